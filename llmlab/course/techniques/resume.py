"""Checkpoint and resume: the whole state of a training run, saved and loaded on any number of ranks.

The files are those of torch.distributed.checkpoint.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import LRScheduler

from .training_loop import batch_seed

SEQUENCES_OF_THE_TEXT = 40  # one epoch; it is short, so that the few steps of a chapter reach the second epoch


class Order:
    """The order of the data: all sequences of the text, in a new random order in each epoch."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch, self.position = seed, 0, 0

    def next(self) -> int:
        if self.position == SEQUENCES_OF_THE_TEXT:
            self.epoch, self.position = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(batch_seed(self.seed, self.epoch))
        self.position += 1
        return int(torch.randperm(SEQUENCES_OF_THE_TEXT, generator=generator)[self.position - 1])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


@dataclass
class Progress:
    """The state of a rank on which the next step depends. `losses` has the loss of each step so far, in nats per token,
    and `generator` draws the masks of dropout."""

    rank: int
    ranks: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    order: Order
    generator: torch.Generator
    losses: list[float] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Return everything on which the next step depends."""
        weights, moments = get_state_dict(self.model, self.optimizer)  # only the shards of this rank
        return {
            "model": weights,
            "optimizer": moments,
            "schedule": self.schedule.state_dict(),
            "order": self.order.state_dict(),
            "generators": {str(self.rank): self.generator.get_state()},
            "losses": list(self.losses),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load the parts that `state` has; the others stay as they are."""
        if "model" in state:
            moments = state.get("optimizer", get_state_dict(self.model, self.optimizer)[1])
            set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=moments)
        if "schedule" in state:
            self.schedule.load_state_dict(state["schedule"])
        if "order" in state:
            self.order.load_state_dict(state["order"])
        if "generators" in state:
            self.generator.set_state(state["generators"][str(self.rank)])
        self.losses = state["losses"]


# ---- checkpoints


def save(progress: Progress, folder: Path, write: Callable[[Path], dcp.StorageWriter] = dcp.FileSystemWriter) -> None:
    """Save a checkpoint after the current step. Each rank writes its shards, then the folder gets its name."""
    complete = folder / f"step-{len(progress.losses):06}"
    unfinished = complete.with_suffix(".unfinished")
    dcp.save(progress.state(), storage_writer=write(unfinished))  # returns when all ranks have written
    if progress.rank == 0:
        unfinished.rename(complete)  # atomic: the checkpoint is either complete or absent
    dist.barrier()


def last_whole(folder: Path) -> Path | None:
    """Return the complete checkpoint of the latest step, or None."""
    complete = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return max(complete, key=lambda path: int(path.name.partition("-")[2]), default=None)  # step-1000000: seven digits


def resume(progress: Progress, checkpoint: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Load a checkpoint that any number of ranks has written. Each rank reads the parts that overlap its own shards.

    Each rank has its own random states. If the number of ranks has changed, they stay as seeded.
    """
    state = progress.state()
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    if sum(name.startswith("generators.") for name in saved) != progress.ranks:
        leave_out += ("generators",)
    for part in {*leave_out}:
        del state[part]
    dcp.load(state, checkpoint_id=checkpoint)
    progress.load(state)


class KilledWriter(dcp.FileSystemWriter):
    """Writes this rank's shards, and kills the process before the other ranks know, to show the result of a crash."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        super().write_data(plan, planner).wait()
        os.kill(os.getpid(), signal.SIGKILL)
