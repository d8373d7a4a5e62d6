"""Data parallelism by five engines behind one handle: ours from scratch, torch's DDP and FSDP2, and DeepSpeed.

Each function takes a GPT that is the same on every rank and returns an `Engine`; one optimizer step is
`forward_backward(ids)`, then `step()`. The bytes on a rank are counted by looking at the tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base import compat
from ...base.errors import NotAvailable, SpecError
from ...engines.configs import DEEPSPEED_COMMON
from ...ranks.fsdp import shard_units
from ..architectures.gpt import GPT
from ..techniques.data_parallel import METHODS, Overlapped, average_gradients, same_model
from ..techniques.memory_anatomy import storage_bytes
from ..techniques.training_loop import next_token_loss
from ..techniques.zero import Zero
from .job import Job, tiny_gpt

STAGES = {"scratch": (0, 1, 2, 3), "ddp": (0,), "fsdp": (3,), "deepspeed": (0, 1, 2, 3)}  # of ZeRO, by engine
# Settings of the optimizer in every engine, for all parameters.
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Engine:
    """The functions of an engine that a training loop calls, and functions that count bytes on this rank."""

    forward_backward: Callable[[Tensor], float | None]  # takes the whole batch of a step, (B, T), returns its loss
    step: Callable[[], Any]
    parameters: Callable[[], int]
    gradients: Callable[[], int]
    optimizer: Callable[[], dict[str, int]]
    sent: Callable[[], int | None] = lambda: None  # bytes that this rank has sent; None where the engine hides them
    place: tuple[int, ...] | None = None  # of this rank in a mesh (pp, dp, tp)


def check(job: Job) -> None:
    """Raise SpecError if the engine does not have the stage or method, and NotAvailable if it is not installed."""
    engine, stage = job.engine, job.run.zero
    if job.method not in METHODS:
        raise SpecError(f"method={job.method!r} is not one of {', '.join(METHODS)}")
    if engine not in STAGES:
        raise SpecError(f"engine={engine!r} is not one of {', '.join(STAGES)}")
    if stage not in STAGES[engine]:
        has = ", ".join(map(str, STAGES[engine]))
        raise SpecError(f"stage={stage!r} with engine={engine!r}: give one of its stages, {has}")
    if engine == "deepspeed" and find_spec("deepspeed") is None:
        raise NotAvailable("engine='deepspeed' is not installed: pip install 'llmlab[distributed]', on Linux")


def replica(job: Job) -> Engine:
    """Return the job's engine for a GPT whose weights follow from torch's seed. ZeRO's stage 0 is data parallelism."""
    model, stage = GPT(tiny_gpt()), job.run.zero
    if job.engine == "scratch":
        return zero(model, stage) if stage else scratch(model, job.method)
    if job.engine == "deepspeed":
        return deepspeed(model, stage)
    return ddp(model) if job.engine == "ddp" else fsdp(model)


def local(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the tensors on this rank; of a DTensor, its local part counts."""
    return storage_bytes(getattr(tensor, "_local_tensor", tensor) for tensor in tensors)


def states(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of an optimizer's states; step counters, one number per tensor, are left out."""
    tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.ndim]
    return {"optimizer": local(tensors)}


def by_adamw(
    parameters: Iterable[nn.Parameter], forward_backward: Callable[[Tensor], float | None], **fields: Any
) -> Engine:
    """Return the engine whose step is torch's AdamW on `parameters`."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, foreach=False, **ADAMW)  # foreach refuses to mix DTensors and Tensors

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Engine(
        forward_backward,
        step,
        parameters=lambda: local(parameters),
        gradients=lambda: local(p.grad for p in parameters),
        optimizer=lambda: states(optimizer),
        **fields,
    )


def on_my_sequences(
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Any] = Tensor.backward,
    finish: Callable[[], Any] = lambda: None,
) -> Callable[[Tensor], float]:
    """Return a function that runs forward and backward on this rank's share of a batch, (B, T).

    It returns the mean loss over all ranks. `finish` runs after backward, and may average the gradients.
    """

    def forward_backward(ids_BT: Tensor) -> float:
        share = len(ids_BT) // dist.get_world_size()
        mine_BT = ids_BT[dist.get_rank() * share :][:share]
        loss = next_token_loss(forward(mine_BT), mine_BT)
        backward(loss)
        finish()
        mean = loss.detach() / dist.get_world_size()  # shares are equal, so the mean of means is the mean
        dist.all_reduce(mean)
        return mean.item()

    return forward_backward


def scratch(model: nn.Module, method: str) -> Engine:
    """Return data parallelism as in techniques/data_parallel.py."""
    if method == "naive":
        same_model(model)
        sent = [0]

        def average() -> None:
            sent[0] += average_gradients(model)

        return by_adamw(model.parameters(), on_my_sequences(model, finish=average), sent=lambda: sent[0])
    averaged = Overlapped(model, 0) if method == "hooks" else Overlapped(model)
    return by_adamw(model.parameters(), on_my_sequences(model, finish=averaged.wait))


def ddp(model: nn.Module) -> Engine:
    """Return torch.nn.parallel.DistributedDataParallel."""
    return by_adamw(model.parameters(), on_my_sequences(nn.parallel.DistributedDataParallel(model)))


def zero(model: GPT, stage: int) -> Engine:
    """Return a stage of techniques/zero.py; a unit is a block."""
    shared = Zero(model, list(model.h), stage, torch.optim.AdamW, **ADAMW)
    return Engine(
        on_my_sequences(model, shared.backward),
        shared.step,
        shared.parameter_bytes,
        shared.gradient_bytes,
        lambda: states(shared.optimizer),
        lambda: shared.sent,
    )


def fsdp(model: GPT) -> Engine:
    """Return torch.distributed.fsdp.fully_shard (FSDP2), which is ZeRO-3 with parameters cut along dimension 0."""
    from torch.distributed.device_mesh import init_device_mesh

    shard_units(model, model.h, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return by_adamw(model.parameters(), on_my_sequences(model))


def quiet_deepspeed() -> None:
    """Make DeepSpeed use the CPU and gloo, whatever GPU this machine has."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    compat.check("deepspeed")
    compat.check("deepspeed.ops")
    import deepspeed as library

    # DeepSpeed would compile its own CPU collectives at first use, which takes minutes. Those of gloo do the same.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def deepspeed(model: nn.Module, stage: int, **settings: Any) -> Engine:
    """Return deepspeed.initialize at stages 0 to 3, in fp32, with further `settings` of zero_optimization."""
    quiet_deepspeed()
    import deepspeed as library

    config = {
        "train_micro_batch_size_per_gpu": 1,  # not the real size; DeepSpeed only needs it to count accumulation steps
        "zero_optimization": {"stage": stage, **settings},
        **DEEPSPEED_COMMON,  # allows torch's AdamW, so that all engines make the same update
    }
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)
    return Engine(
        on_my_sequences(engine, engine.backward),
        engine.step,
        parameters=lambda: local(getattr(p, "ds_tensor", p) for p in model.parameters()),
        gradients=lambda: _deepspeed_gradients(engine, stage),
        optimizer=lambda: {**states(engine.optimizer if stage == 0 else engine.optimizer.optimizer), **_master(engine)},
    )


def _deepspeed_gradients(engine: Any, stage: int) -> int:
    gradients = [p.grad for p in engine.module.parameters()]
    if stage:
        averaged = engine.optimizer.averaged_gradients
        gradients += [t for tensors in averaged.values() for t in (tensors or [])]
    return local(gradients)


def _master(engine: Any) -> dict[str, int]:
    """Return the bytes of the flat copy of the parameters that DeepSpeed updates, which exists in fp32 too."""
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        if groups := getattr(engine.optimizer, name, None):
            return {"master": local(groups)}
    return {"master": 0}
