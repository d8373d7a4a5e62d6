"""The experiment of chapter 17 on two ranks: checkpoints that are interrupted, or that overwrite others."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class FullDisk(dcp.FileSystemWriter):
    """Writes the shards of rank 0. On the other ranks, the disk is full."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        if dist.get_rank():
            raise OSError("No space left on device")
        return super().write_data(plan, planner)


def _sharded(value: float) -> DTensor:
    """Return four numbers, half of them on each of two ranks."""
    return distribute_tensor(torch.full((4,), value), init_device_mesh("cpu", (2,)), [Shard(0)])


def _save_failing(value: float, folder: Path) -> bool:
    """Save to a disk that is full on rank 1; return whether the save raised an error."""
    try:
        dcp.save({"weights": _sharded(value)}, storage_writer=FullDisk(folder))
    except CheckpointException:
        return True
    return False


def _loaded(folder: Path) -> list[float] | str:
    """Return the four numbers in a checkpoint, or "refused" if it does not load."""
    state = {"weights": _sharded(0.0)}
    try:
        dcp.load(state, checkpoint_id=folder)
    except CheckpointException:
        return "refused"
    return state["weights"].full_tensor().tolist()


def chapter(folder: str) -> dict[str, Any]:
    """Save checkpoints while a disk is full, over an older one and during training; return the numbers that load."""
    fresh, overwritten, background = (Path(folder) / name for name in ("fresh", "over", "later"))
    failed = _save_failing(2.0, fresh)
    outcomes: dict[str, Any] = {"in a fresh folder": _loaded(fresh)}
    dcp.save({"weights": _sharded(1.0)}, checkpoint_id=overwritten)
    failed = _save_failing(2.0, overwritten) and failed
    outcomes["over another"] = _loaded(overwritten)
    state = {"weights": _sharded(1.0)}
    saving = dcp.async_save(state, checkpoint_id=background)
    assert isinstance(saving, Future)  # async_save returns another type only if the caller asks for it
    state["weights"].add_(1)  # training goes on while a thread writes
    saving.result()
    outcomes["while training went on"] = _loaded(background)
    return {**outcomes, "raised": failed}
