"""Train a small GPT with its optimizer on the device, on the host, in files, and by DeepSpeed's offload.

The seed determines weights and batches, so all engines should compute the same losses. The bytes in each place are
counted after the last step.

    torch      AdamW on the device, with an fp32 master copy of half weights
    scratch    offload.py, states in the host's memory
    files      offload.py, states in files
    cpu-adam   offload.py with DeepSpeedCPUAdam, whose compilation at first use takes minutes
    deepspeed  ZeRO-3 on two ranks with offload_param and offload_optimizer: Training(...).to_deepspeed()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ...base.errors import NotAvailable, SpecError, check_counts
from ...data import tokens, windows
from ...ranks.launch import launch
from ...specs.run import Precision, Training
from ..architectures.gpt import GPT
from ..techniques.memory_anatomy import storage_bytes
from ..techniques.offload import InFiles, Offloaded, in_ram
from ..techniques.precision import MasterWeights
from ..techniques.training_loop import batch_seed, next_token_loss
from .cpu_adam import adam_times, cpu_adam
from .engines import ADAMW, local, quiet_deepspeed, states
from .job import SEQ_LEN, Job, tiny_gpt

ENGINES = ("torch", "scratch", "files", "cpu-adam", "deepspeed")
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "mixed-bf16": torch.bfloat16}
BUCKET_BYTES = 50_000  # divides a model of 78,144 parameters into several buckets
RANKS = 2  # of DeepSpeed


def make_job(
    engine: str = "scratch", precision: Precision = "fp32", steps: int = 20, sequences: int = 4, accumulation: int = 1,
    seed: int = 0,
) -> Job:  # fmt: skip
    """Return the job of `engine`; DeepSpeed's ranks share the `sequences` of a micro-batch. Raises SpecError for
    impossible values, and NotAvailable if the engine needs DeepSpeed and it is not installed."""
    check_counts(steps=steps, sequences=sequences, accumulation=accumulation)
    for name, value, allowed in (("engine", engine, ENGINES), ("precision", precision, tuple(DTYPES))):
        if value not in allowed:
            raise SpecError(f"{name}={value!r} is not one of {', '.join(allowed)}")
    if engine in ("cpu-adam", "deepspeed") and find_spec("deepspeed") is None:
        raise NotAvailable(f"engine={engine!r} is DeepSpeed's: pip install 'llmlab[distributed]', on Linux")
    if engine == "deepspeed" and sequences % RANKS:
        raise SpecError(f"sequences={sequences} is not shared equally by DeepSpeed's {RANKS} ranks")
    placement: dict[str, Any] = {} if engine == "torch" else {"offload": "optimizer"}
    if engine == "deepspeed":
        sequences //= RANKS
        placement = {"offload": "optimizer+parameters", "zero": 3, "dp": RANKS}
    run = Training(sequences, SEQ_LEN, precision, accumulation=accumulation, **placement)
    return Job("offload", run, engine, steps, seed)


def run_job(job: Job) -> dict[str, Any]:
    """Train; return losses (nats per token), bytes by device, host and files, and bytes moved in all steps."""
    if job.engine == "deepspeed":
        return launch(with_deepspeed, RANKS, job, patience=60)[0]
    if job.engine == "torch":
        return on_device(job)
    with TemporaryDirectory(prefix="llmlab-states-") as folder:
        return offloaded(job, Path(folder))


def on_device(job: Job) -> dict[str, Any]:
    """Train with AdamW on the device of the model."""
    gpt = new_gpt(job)
    masters = MasterWeights(gpt.parameters())
    optimizer = torch.optim.AdamW(masters.parameters, **ADAMW)

    def update() -> None:
        masters.copy_gradients()
        optimizer.step()
        masters.copy_weights()
        optimizer.zero_grad()

    losses = train(job, gpt, update)
    copies = [master for _, master in masters.pairs]
    return report(job, losses, device={"weights": gpt.parameters(), "states": [*copies, *moments([optimizer])]})


def offloaded(job: Job, folder: Path) -> dict[str, Any]:
    """Train with the optimizer of offload.py; the engine "files" stores the states in `folder`."""
    gpt, files = new_gpt(job), InFiles(folder)
    kind = cpu_adam() if job.engine == "cpu-adam" else torch.optim.AdamW
    optimizer = Offloaded(gpt.parameters(), kind, BUCKET_BYTES, files if job.engine == "files" else in_ram, **ADAMW)
    losses = train(job, gpt, optimizer.step)
    host: dict[str, Iterable[Tensor]] = {"staging": [bucket.staging for bucket in optimizer.buckets]}
    in_files = {}
    if job.engine == "files":
        in_files = {"states": sum(path.stat().st_size for path in files.paths)}
    else:
        masters = [bucket.master for bucket in optimizer.buckets]
        host["states"] = [*masters, *moments(bucket.optimizer for bucket in optimizer.buckets)]
    return report(job, losses, {"weights": gpt.parameters()}, host) | {"files": in_files, "moved": optimizer.moved}


def new_gpt(job: Job, dtype: torch.dtype | None = None) -> GPT:
    """Return the model on the job's device, in `dtype`, by default that of the run."""
    torch.manual_seed(job.seed)
    return GPT(tiny_gpt()).to(device_of(job), dtype or DTYPES[job.run.precision])


def device_of(job: Job) -> str:
    return "cuda" if torch.cuda.is_available() and job.engine != "deepspeed" else "cpu"


def batch(job: Job, step: int, micro_batch: int) -> Tensor:
    """Return the ids of one micro-batch of all ranks, (B, T)."""
    seed = batch_seed(job.seed, step * job.run.accumulation + micro_batch)
    return windows(tokens(tiny_gpt().vocab), job.run.micro_batch * job.run.dp, job.run.seq_len, seed)


def train(job: Job, gpt: GPT, update: Callable[[], object]) -> list[float]:
    """Run the steps; return the loss of each, the mean of its micro-batches."""
    losses = []
    for step in range(job.steps):
        total = 0.0
        for micro_batch in range(job.run.accumulation):
            ids_BT = batch(job, step, micro_batch).to(device_of(job))
            loss = next_token_loss(gpt(ids_BT), ids_BT) / job.run.accumulation
            loss.backward()
            total += loss.item()
        update()
        losses.append(total)
    return losses


def report(
    job: Job, losses: list[float], device: dict[str, Iterable[Tensor]], host: dict[str, Iterable[Tensor]] | None = None
) -> dict[str, Any]:
    """Return the losses, and the bytes of the tensors that are on the device and on the host, by part."""
    return {
        "engine": job.engine, "precision": job.run.precision, "losses": losses,
        "device": {part: storage_bytes(tensors) for part, tensors in device.items()},
        "host": {part: storage_bytes(tensors) for part, tensors in (host or {}).items()},
        "files": {}, "moved": None,
    }  # fmt: skip


def moments(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the moments of AdamW optimizers, without their step counters."""
    values = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, Tensor) and value.ndim]


# ---- DeepSpeed


def with_deepspeed(job: Job) -> dict[str, Any]:
    """Train this rank by DeepSpeed's ZeRO-3 with parameters and optimizer offloaded, as the Training's config says."""
    quiet_deepspeed()
    import deepspeed

    gpt = new_gpt(job, torch.float32)  # DeepSpeed creates the half copy itself
    optimizer = torch.optim.AdamW(gpt.parameters(), **ADAMW)
    config = job.run.to_deepspeed()
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # otherwise such a small model stays whole
    engine, *_ = deepspeed.initialize(model=gpt, optimizer=optimizer, config=config)
    losses = _train_by_deepspeed(job, engine)
    parameters = list(engine.module.parameters())
    masters = local(engine.optimizer.fp32_partitioned_groups_flat)
    config = engine.config["zero_optimization"]
    return report(job, losses, {}) | {
        "device": {"weights": sum(p.nbytes for p in parameters)},  # the parameters that are whole between steps
        "host": {
            "weights": local(p.ds_tensor for p in parameters),
            "states": states(engine.optimizer.optimizer)["optimizer"] + masters,
        },
        "offloads": {name: config[name]["device"] for name in ("offload_param", "offload_optimizer")},
        "stage": engine.zero_optimization_stage(),
    }


def _train_by_deepspeed(job: Job, engine: Any) -> list[float]:
    """Run the steps on this rank's share of each micro-batch; return the mean loss over all ranks for each step."""
    run, losses = job.run, []
    for step in range(job.steps):
        total = 0.0
        for micro_batch in range(run.accumulation):
            mine_BT = batch(job, step, micro_batch)[torch.distributed.get_rank() * run.micro_batch :][: run.micro_batch]
            loss = next_token_loss(engine(mine_BT), mine_BT)
            engine.backward(loss)
            engine.step()
            torch.distributed.all_reduce(mean := loss.detach() / run.dp)
            total += mean.item() / run.accumulation
        losses.append(total)
    return losses


def chapter(job: Job) -> dict[str, Any]:
    """Run DeepSpeed's experiments of the page in this rank."""
    result = with_deepspeed(job)
    return {**result, "adams": adam_times() if torch.distributed.get_rank() == 0 else {}}
