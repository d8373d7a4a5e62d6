"""Train one small GPT with its optimizer on the device, on the host, in files, and by DeepSpeed's offload.

What `python -m llmlab.experiments offload` runs. Weights and batches follow from the seed alone, so all engines should
give the same losses; what each holds where is counted after the last step.

    torch      AdamW on the device, with an fp32 master copy of half weights
    scratch    offload.py, states in the host's memory
    files      offload.py, states in files
    cpu-adam   offload.py with DeepSpeed's DeepSpeedCPUAdam, which is compiled at first use, in minutes
    deepspeed  ZeRO-3 on two ranks with offload_param and offload_optimizer: Training(...).to_deepspeed()
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures.gpt import GPT
from ..base.errors import NotAvailable, SpecError
from ..data import tokens, windows
from ..ranks.launch import launch
from ..specs.run import Precision, Training
from ..step.optimizer import MasterWeights
from ..techniques.memory_anatomy import storage_bytes
from ..techniques.offload import InFiles, Offloaded, in_ram
from ..techniques.training_loop import batch_seed, next_token_loss
from .engines import ADAMW, local, quiet_deepspeed, states
from .train import TINY_GPT, check_counts, check_seed, loss_lines, sizes, tiny_gpt

ENGINES = ("torch", "scratch", "files", "cpu-adam", "deepspeed")
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "mixed-bf16": torch.bfloat16}
BUCKET_BYTES = 50_000  # of a model of 78 144 parameters: several buckets
RANKS = 2  # of DeepSpeed
SEQ_LEN = TINY_GPT["n_positions"]


@dataclass(frozen=True)
class Job:
    """What is trained, and where its states are; raises SpecError for what cannot be."""

    engine: str = "scratch"
    precision: Precision = "fp32"
    steps: int = 20
    sequences: int = 4  # of a micro-batch
    accumulation: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "steps", "sequences", "accumulation")
        check_seed(self)
        for name, allowed in (("engine", ENGINES), ("precision", tuple(DTYPES))):
            if getattr(self, name) not in allowed:
                raise SpecError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.engine in ("cpu-adam", "deepspeed") and find_spec("deepspeed") is None:
            raise NotAvailable(f"engine={self.engine!r} is DeepSpeed's: pip install 'llmlab[distributed]', on Linux")
        if self.engine == "deepspeed" and self.sequences % RANKS:
            raise SpecError(f"sequences={self.sequences} is not shared equally by DeepSpeed's {RANKS} ranks")

    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() and self.engine != "deepspeed" else "cpu"

    def batch(self, step: int, micro_batch: int) -> Tensor:
        """Return the ids of one micro-batch, (B, T)."""
        seed = batch_seed(self.seed, step * self.accumulation + micro_batch)
        return windows(tokens(TINY_GPT["vocab_size"]), self.sequences, SEQ_LEN, seed)


def model(job: Job) -> GPT:
    torch.manual_seed(job.seed)
    return GPT(tiny_gpt()).to(job.device(), DTYPES[job.precision])


def run(job: Job) -> dict[str, Any]:
    """Train; return losses (nats a token), bytes held by device, host and files, and bytes moved in all steps."""
    if job.engine == "deepspeed":
        return launch(with_deepspeed, RANKS, job, patience=60)[0]
    if job.engine == "torch":
        return on_device(job)
    with TemporaryDirectory(prefix="llmlab-states-") as folder:
        return offloaded(job, Path(folder))


def losses_of(job: Job, gpt: GPT, update: Any) -> list[float]:
    """Run the steps; return the loss of each, the mean of its micro-batches."""
    losses = []
    for step in range(job.steps):
        total = 0.0
        for micro_batch in range(job.accumulation):
            ids_BT = job.batch(step, micro_batch).to(job.device())
            loss = next_token_loss(gpt(ids_BT), ids_BT) / job.accumulation
            loss.backward()
            total += loss.item()
        update()
        losses.append(total)
    return losses


def on_device(job: Job) -> dict[str, Any]:
    """Train with AdamW where the model is."""
    gpt = model(job)
    masters = MasterWeights(gpt.parameters())
    optimizer = torch.optim.AdamW(masters.parameters, **ADAMW)

    def update() -> None:
        masters.take_gradients()
        optimizer.step()
        masters.give_weights()
        optimizer.zero_grad()

    losses = losses_of(job, gpt, update)
    held = [*(master for _, master in masters.pairs), *_moments([optimizer])]
    return found(job, losses, {"weights": list(gpt.parameters()), "states": held})


def offloaded(job: Job, folder: Path) -> dict[str, Any]:
    """Train with the optimizer of offload.py."""
    gpt = model(job)
    files = InFiles(folder)
    engine = cpu_adam() if job.engine == "cpu-adam" else torch.optim.AdamW
    optimizer = Offloaded(gpt.parameters(), engine, BUCKET_BYTES, files if job.engine == "files" else in_ram, **ADAMW)
    losses = losses_of(job, gpt, optimizer.step)
    masters = [bucket.master for bucket in optimizer.buckets]
    held = [*masters, *_moments(bucket.optimizer for bucket in optimizer.buckets)]
    elsewhere: dict[str, list[Tensor]] = {"border": [bucket.border for bucket in optimizer.buckets]}
    if job.engine == "files":
        sizes_of_files = {"states": sum(path.stat().st_size for path in files.paths)}
        here = found(job, losses, {"weights": list(gpt.parameters())}, elsewhere, optimizer.moved)
        return here | {"files": sizes_of_files}
    return found(job, losses, {"weights": list(gpt.parameters())}, elsewhere | {"states": held}, optimizer.moved)


def found(
    job: Job, losses: list[float], device: dict[str, list[Tensor]], host: dict[str, list[Tensor]] | None = None,
    moved: dict[str, int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    held_by = {kind: {part: storage_bytes(held) for part, held in (parts or {}).items()}
             for kind, parts in (("device", device), ("host", host))}  # fmt: skip
    return {"engine": job.engine, "precision": job.precision, "losses": losses, **held_by, "files": {}, "moved": moved}


def _moments(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    every = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return [value for value in every if isinstance(value, Tensor) and value.ndim]  # a step's number is left out


def with_deepspeed(job: Job) -> dict[str, Any]:
    """Run in each rank: DeepSpeed's ZeRO-3 with parameters and optimizer offloaded, from the config of a Training."""
    quiet_deepspeed()
    import deepspeed

    share = job.sequences // RANKS
    run = Training(
        micro_batch=share, seq_len=SEQ_LEN, precision=job.precision, accumulation=job.accumulation, dp=RANKS, zero=3,
        offload="optimizer+parameters",
    )  # fmt: skip
    gpt = model(Job(**{**vars(job), "precision": "fp32"}))  # it makes the half copy itself
    optimizer = torch.optim.AdamW(gpt.parameters(), **ADAMW)
    config = run.to_deepspeed()
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # else a model as small as this stays whole
    engine, *_ = deepspeed.initialize(model=gpt, optimizer=optimizer, config=config)
    losses = []
    for step in range(job.steps):
        total = 0.0
        for micro_batch in range(job.accumulation):
            mine_BT = job.batch(step, micro_batch)[torch.distributed.get_rank() * share :][:share]
            loss = next_token_loss(engine(mine_BT), mine_BT)
            engine.backward(loss)
            engine.step()
            torch.distributed.all_reduce(mean := loss.detach() / RANKS)
            total += mean.item() / job.accumulation
        losses.append(total)
    parameters = list(engine.module.parameters())
    moments = states(engine.optimizer.optimizer)["optimizer"]
    masters = local(engine.optimizer.fp32_partitioned_groups_flat)
    host = {"weights": local(p.ds_tensor for p in parameters), "states": moments + masters}
    device = {"weights": sum(p.nbytes for p in parameters)}  # between steps: what is whole
    config = engine.config["zero_optimization"]
    offloads = {name: config[name]["device"] for name in ("offload_param", "offload_optimizer")}
    return {
        "engine": job.engine, "precision": job.precision, "losses": losses, "device": device, "host": host, "files": {},
        "moved": None, "offloads": offloads, "stage": engine.zero_optimization_stage(),
    }  # fmt: skip


def cpu_adam() -> type:
    """Return DeepSpeedCPUAdam; raises NotAvailable where it cannot be compiled."""
    if (lock := _compiled_to() / "lock").exists():  # torch.utils.file_baton: others would wait for it, for ever
        raise NotAvailable(f"DeepSpeedCPUAdam is being compiled, or a process that did was killed: then delete {lock}")
    quiet_deepspeed()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])  # pip's ninja
    try:
        DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1, device="cpu"))])
    except (RuntimeError, OSError, ImportError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise NotAvailable(f"DeepSpeedCPUAdam needs a C++ compiler and ninja: {reason}") from None
    return DeepSpeedCPUAdam


def adam_times(elements: int = 2**22, steps: int = 5) -> dict[str, dict[str, float]]:
    """Return, by kind of AdamW, the seconds of its quickest step on one thread, and how far its weights are off.

    DeepSpeedCPUAdam is among them where it is compiled.
    """
    torch.set_num_threads(1)
    kinds: dict[str, tuple[type, dict]] = {
        "torch, one by one": (torch.optim.AdamW, {"foreach": False}),
        "torch, fused": (torch.optim.AdamW, {"fused": True}),
    }
    if cpu_adam_is_compiled():
        kinds["DeepSpeedCPUAdam"] = (cpu_adam(), {})
    result, first = {}, None
    for name, (kind, options) in kinds.items():
        weight = nn.Parameter(torch.linspace(-1, 1, elements))
        optimizer = kind([weight], **ADAMW, **options)
        seconds = []
        for step in range(steps):
            weight.grad = torch.linspace(-1, 1, elements).roll(step)
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        first = weight.detach() if first is None else first
        result[name] = {"seconds": min(seconds), "off": (weight.detach() - first).abs().max().item()}
    return result


def chapter(job: Job) -> dict[str, Any]:
    """Run in each rank: all that the page has DeepSpeed do."""
    run_by_deepspeed = with_deepspeed(job)
    return {**run_by_deepspeed, "adams": adam_times() if torch.distributed.get_rank() == 0 else {}}


def cpu_adam_is_compiled() -> bool:
    """Return whether DeepSpeedCPUAdam was compiled before; another ninja than then compiles it anew all the same."""
    folder = _compiled_to()
    there = (folder / "cpu_adam.so").exists() and not (folder / "lock").exists()
    return find_spec("deepspeed") is not None and there


def _compiled_to() -> Path:
    """Return the folder in which torch.utils.cpp_extension compiles it."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("cpu_adam", False))


def main(arguments: list[str] | None = None) -> None:
    """The command line. Exit code 2: it cannot be run as asked."""
    parser = argparse.ArgumentParser(
        prog="python -m llmlab.experiments offload", description="Train a small GPT whose optimizer is elsewhere."
    )
    parser.add_argument("--engine", default="scratch", help=f"{', '.join(ENGINES)} (default scratch)")
    parser.add_argument("--precision", default="fp32", help=f"{' or '.join(DTYPES)} (default fp32)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    parser.add_argument("--sequences", type=int, default=4, help="of a micro-batch (default 4)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    try:
        result = run(Job(**options))
    except (SpecError, NotAvailable) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(json.dumps(result) if as_json else table(result))


def table(result: dict[str, Any]) -> str:
    """Return losses, and what was held where and moved, as lines."""
    places = [f"{place:6}: {sizes(result[place])}" for place in ("device", "host", "files")]
    moved = [f"moved : {sizes(result['moved'])}"] if result["moved"] else []
    return "\n".join([*loss_lines(result), *places, *moved])
