"""Train a small GPT in one process or in thousands, with the same script under every launcher.

    python -m llmlab.course.experiments.cluster
    torchrun --nproc-per-node 8 -m llmlab.course.experiments.cluster --sequences 16 --folder run
    accelerate launch --multi_gpu --num_processes 8 -m llmlab.course.experiments.cluster --sequences 16 --folder run
    deepspeed --num_accelerators 8 --module llmlab.course.experiments.cluster --sequences 16 --folder run
    sbatch cluster.sbatch --sequences 64 --folder run

With --folder it saves a checkpoint every few steps. The same command then continues from the last complete one, on
any number of ranks. The batch of a step does not depend on the number of ranks. Rank 0 prints one line of JSON.

    B  micro_batch     T  seq_len
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

from ...base.errors import SpecError, check_counts
from ...data import tokens
from ...ranks.fsdp import shard_units
from ...specs.model import model as find_model
from ...specs.run import Training
from ..architectures.gpt import GPT
from ..techniques.learning_rate import warmup_cosine
from ..techniques.resume import SEQUENCES_OF_THE_TEXT, KilledWriter, Order, Progress, last_whole, resume, save
from ..techniques.training_loop import next_token_loss
from .command import command
from .engines import ADAMW
from .job import TINY_GPT, Job

SHOWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class Place:
    """The number of this process, in the job and on its node, and how many processes there are in both."""

    rank: int = 0
    local_rank: int = 0
    ranks: int = 1
    local_ranks: int = 1


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Return the place of this process, which the launcher has set in the environment. Without a launcher, the process
    is alone.

    Raises SpecError for impossible values, and for tasks of srun without a RANK, because each would train alone.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    values = {name: environment[name] for name in names if environment.get(name)}
    if not values:
        tasks = environment.get("SLURM_NTASKS", "1")
        if tasks != "1":
            raise SpecError(f"SLURM_NTASKS={tasks} and no RANK: in each task start torchrun, as in cluster.sbatch")
        return Place()
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    try:
        rank, local_rank, ranks = (int(values[name]) for name in names)
        local_ranks = int(environment.get("LOCAL_WORLD_SIZE") or local_rank + 1)
    except (KeyError, ValueError):
        raise SpecError(f"{shown}: a launcher sets RANK, LOCAL_RANK and WORLD_SIZE, whole numbers") from None
    if not 0 <= local_rank <= rank < ranks:
        raise SpecError(f"{shown}: give 0 <= LOCAL_RANK <= RANK < WORLD_SIZE")
    return Place(rank, local_rank, ranks, local_ranks)


def make_job(
    ranks: int, sequences: int = 8, micro_batch: int = 2, steps: int = 8, seq_len: int = 64, seed: int = 0
) -> Job:
    """Return the job on `ranks` ranks. A step has `sequences` over all ranks, so more ranks accumulate less.

    Raises SpecError for counts that do not divide each other.
    """
    check_counts(ranks=ranks, sequences=sequences, micro_batch=micro_batch)
    if sequences % (micro_batch * ranks):
        raise SpecError(f"sequences={sequences} are not a multiple of micro_batch={micro_batch} × {ranks} ranks")
    accumulation, zero = sequences // (micro_batch * ranks), 3 if ranks > 1 else 0
    run = Training(micro_batch, seq_len, accumulation=accumulation, dp=ranks, zero=zero)
    return Job("cluster", run, steps=steps, seed=seed)


@dataclass(frozen=True)
class Saving:
    """The folder of the checkpoints, one after every `every` steps; without a folder there are none.

    `kill` is "RANK:STEP" or "RANK:STEP:save": unless the run was resumed, that rank is killed after that many steps, or
    while it saves the checkpoint after them. Raises SpecError for another form.
    """

    folder: str | None = None
    every: int = 4
    kill: str | None = None

    def __post_init__(self) -> None:
        check_counts(save_every=self.every)
        if self.kill and not re.fullmatch(r"\d+:\d+(:save)?", self.kill):
            raise SpecError(f"kill={self.kill!r} is not RANK:STEP or RANK:STEP:save")


# ---- the run


def join(here: Place) -> torch.device:
    """Join the process group, with NCCL if each process of the node has a GPU, and otherwise with gloo."""
    on_gpu = torch.cuda.device_count() >= here.local_ranks
    device = torch.device("cuda", here.local_rank) if on_gpu else torch.device("cpu")  # a node has no GPU 8
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def train(
    job: Job, here: Place, device: torch.device, saving: Saving = Saving(), dropout: float = 0.1,
    leave_out: tuple[str, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """Train in this rank of a joined group, from the last complete checkpoint if there is one.

    Returns the losses, the number of steps before the resume, and the number of ranks and micro-batches. `leave_out`
    names parts of the checkpoint that are not loaded, as in `resume`.
    """
    run, folder = job.run, Path(saving.folder) if saving.folder else None
    progress = start(job, here, device, dropout)
    checkpoint = last_whole(folder) if folder else None
    if checkpoint:
        resume(progress, checkpoint, leave_out)
    begin = len(progress.losses)
    text = tokens(TINY_GPT["vocab_size"])[: SEQUENCES_OF_THE_TEXT * run.seq_len].view(-1, run.seq_len)
    progress.model.train()
    for step in range(begin, job.steps):
        if saving.kill == f"{here.rank}:{step}" and not begin:
            os.kill(os.getpid(), signal.SIGKILL)
        rows = [progress.order.next() for _ in range(run.global_batch)]  # every rank draws all rows, and uses its share
        mine = text[rows[here.rank :: here.ranks]].to(device)
        progress.losses.append(_step(progress, mine, run))
        if folder and (step + 1) % saving.every == 0:
            dies = saving.kill == f"{here.rank}:{step + 1}:save" and not begin
            save(progress, folder, KilledWriter if dies else FileSystemWriter)
    return {"ranks": here.ranks, "resumed": begin, "losses": progress.losses, "accumulation": run.accumulation}


def start(job: Job, here: Place, device: torch.device, dropout: float) -> Progress:
    """Return the state before the first step. The weights are the same on every rank, and the optimizer is sharded."""
    torch.manual_seed(job.seed)
    model = GPT(find_model({**TINY_GPT, "resid_pdrop": dropout, "embd_pdrop": dropout})).to(device)
    if job.run.zero:
        shard_units(model, model.h, mesh=init_device_mesh(device.type, (here.ranks,)), **job.run.to_fsdp())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step + 1, 2, job.steps + 1))
    on_gpu = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
    generator.manual_seed(job.seed + 1 + here.rank)  # dropout needs different masks on every rank
    return Progress(here.rank, here.ranks, model, optimizer, schedule, Order(job.seed), generator)


def _step(progress: Progress, mine: Tensor, run: Training) -> float:
    """Do an optimizer step on this rank's sequences, (accumulation · B, T); return the loss over all ranks."""
    total = torch.zeros((), device=mine.device)
    for micro_BT in mine.split(run.micro_batch):
        loss = next_token_loss(progress.model(micro_BT), micro_BT) / run.accumulation
        loss.backward()
        total += loss.detach() / run.dp
    nn.utils.clip_grad_norm_(progress.model.parameters(), 1.0)
    progress.optimizer.step()
    progress.optimizer.zero_grad()
    progress.schedule.step()
    dist.all_reduce(total)
    return total.item()


def main(arguments: list[str] | None = None, name: str = "cluster") -> None:
    """The command line, which every launcher starts in each rank."""
    options = {
        "--steps": (8, None),
        "--sequences": (8, "of a step, over all ranks"),
        "--dropout": (0.1, None),
        "--folder": (str, "of the checkpoints, the same on all nodes; it is resumed from"),
        "--save-every": (4, "steps"),
        "--kill": (str, "that rank then, or while it saves, unless resumed", {"metavar": "RANK:STEP[:save]"}),
        "--local_rank --local-rank": (str, "from the deepspeed launcher; LOCAL_RANK says it too"),
    }
    command(name, "Train a small GPT in whatever was started.", options, _run, arguments)


def _run(
    steps: int, sequences: int, dropout: float, folder: str | None, save_every: int, kill: str | None, local_rank: Any
) -> dict[str, Any] | None:
    """Train in this rank; return the result and the launcher's environment variables of every rank, on rank 0."""
    here = place()
    job, saving = make_job(here.ranks, sequences, steps=steps), Saving(folder, save_every, kill)
    result = train(job, here, join(here), saving, dropout)  # the lines above refuse bad options before the ranks join
    environments: list[Any] = [None] * here.ranks
    dist.all_gather_object(environments, {name: os.environ.get(name) for name in SHOWN})
    dist.destroy_process_group()
    return {**result, "environment": environments} if here.rank == 0 else None


if __name__ == "__main__":
    main()
