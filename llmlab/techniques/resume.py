"""What a training run is between two steps, saved and loaded by torch.distributed.checkpoint on any number of ranks."""

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

SEQUENCES_OF_THE_TEXT = 40  # an epoch: it ends, and its order is drawn anew, within the few steps of a page


class Order:
    """Which sequences come next: all of the text's in a random order, drawn anew for each epoch."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch, self.position = seed, 0, 0

    def next(self) -> int:
        if self.position == SEQUENCES_OF_THE_TEXT:
            self.epoch, self.position = self.epoch + 1, 0
        drawn = torch.Generator().manual_seed(batch_seed(self.seed, self.epoch))
        self.position += 1
        return int(torch.randperm(SEQUENCES_OF_THE_TEXT, generator=drawn)[self.position - 1])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


@dataclass
class Progress:
    """All that the next step depends on, of this rank among `ranks`; `losses` are those of the steps done, in nats per
    token, and `generator` draws dropout's masks."""

    rank: int
    ranks: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    order: Order
    generator: torch.Generator
    losses: list[float] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)  # of sharded tensors, this rank's shards
        return {
            "model": weights,
            "optimizer": moments,
            "schedule": self.schedule.state_dict(),
            "order": self.order.state_dict(),
            "generators": {str(self.rank): self.generator.get_state()},
            "losses": list(self.losses),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` has; a part that it lacks stays as it is."""
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
    """Write the checkpoint of the step reached: each rank its shards, under a name that says it is not whole yet."""
    whole = folder / f"step-{len(progress.losses):06}"
    unfinished = whole.with_suffix(".unfinished")
    dcp.save(progress.state(), storage_writer=write(unfinished))  # returns when all ranks have written
    if progress.rank == 0:
        unfinished.rename(whole)  # one operation of the file system: before it nothing, after it everything
    dist.barrier()


def last_whole(folder: Path) -> Path | None:
    """Return the checkpoint of the highest step that was written to its end."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)  # step-1000000 has seven digits


def resume(progress: Progress, checkpoint: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Load a checkpoint of any number of ranks: each reads the parts that its own shards overlap.

    Random states are per rank: on another number of ranks they stay as seeded.
    """
    state = progress.state()
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    if sum(name.startswith("generators.") for name in saved) != progress.ranks:
        leave_out += ("generators",)
    for part in leave_out:
        del state[part]
    dcp.load(state, checkpoint_id=checkpoint)
    progress.load(state)


class KilledWriter(dcp.FileSystemWriter):
    """Writes this rank's shards, and dies before the others hear of it."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        super().write_data(plan, planner).wait()
        os.kill(os.getpid(), signal.SIGKILL)
