"""What a training run is between two steps, saved and loaded by torch.distributed.checkpoint on any number of ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

from ..models.gpt import GPT
from ..models.spec import model as model_spec
from ..step_ranks import shard_units
from .engines import ADAMW
from .rank_training import TINY_GPT
from .schedules import warmup_cosine
from .training import batch_seed

if TYPE_CHECKING:
    from .cluster_training import Job, Place

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


class Progress:
    """All that the next step depends on; `losses` are those of the steps done, nats a token."""

    def __init__(self, job: Job, here: Place, device: torch.device) -> None:
        self.here, run = here, job.run(here.ranks)
        torch.manual_seed(job.seed)  # the same weights on every rank
        drop = {"resid_pdrop": job.dropout, "embd_pdrop": job.dropout}
        self.model = GPT(model_spec({**TINY_GPT, **drop})).to(device)
        if run.zero:
            mesh = init_device_mesh(device.type, (here.ranks,))
            shard_units(self.model, self.model.h, mesh=mesh, **run.to_fsdp())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)
        self.schedule = LambdaLR(self.optimizer, lambda step: warmup_cosine(step + 1, 2, job.steps + 1))
        self.order = Order(job.seed)
        on_gpu = device.type == "cuda"
        self.generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
        self.generator.manual_seed(job.seed + 1 + here.rank)  # dropout: other masks on every rank
        self.losses: list[float] = []

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)  # of sharded tensors, this rank's shards
        return {
            "model": weights,
            "optimizer": moments,
            "schedule": self.schedule.state_dict(),
            "order": self.order.state_dict(),
            "generators": {str(self.here.rank): self.generator.get_state()},
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
            self.generator.set_state(state["generators"][str(self.here.rank)])
        self.losses = state["losses"]


# ---- checkpoints


def save(progress: Progress, folder: Path, write: Callable[[Path], dcp.StorageWriter] = dcp.FileSystemWriter) -> None:
    """Write the checkpoint of the step reached: each rank its shards, under a name that says it is not whole yet."""
    whole = folder / f"step-{len(progress.losses):06}"
    unfinished = whole.with_suffix(".unfinished")
    dcp.save(progress.state(), storage_writer=write(unfinished))  # returns when all ranks have written
    if progress.here.rank == 0:
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
    if sum(name.startswith("generators.") for name in saved) != progress.here.ranks:
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
