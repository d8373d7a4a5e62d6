"""The eight collective operations, run by real processes: the numbers on each rank before and after.

    from llmlab.ranks.launch import launch
    before_and_after = launch(run_all, 4)[0]

With four ranks, a number shows its origin: rank r starts with 10^r times 1, 2, 3, 4, and 1111 is a sum over all ranks.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

Cells = list[list[float] | None]  # each rank's numbers; None where the operation defines none


def run_all() -> dict[str, tuple[Cells, Cells]]:
    """Run on every rank; return, for each collective operation, the numbers of all ranks before and after."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = 10.0**rank * torch.arange(1, ranks + 1)  # (N,): a chunk for every rank
    own = mine[rank : rank + 1].clone()  # (1,)
    before_and_after = {}

    def note(name: str, before: Tensor | None, after: Tensor | None) -> None:
        before_and_after[name] = (_cells_of_all_ranks(before), _cells_of_all_ranks(after))

    flat = mine.clone() if rank == 0 else torch.zeros(ranks)
    dist.broadcast(flat, src=0)
    note("broadcast", mine if rank == 0 else None, flat)

    flat = mine.clone()
    dist.reduce(flat, dst=0)
    note("reduce", mine, flat if rank == 0 else None)  # on the other ranks the contents are undefined

    part = torch.zeros(1)
    dist.scatter(part, list(mine.split(1)) if rank == 0 else None, src=0)
    note("scatter", mine if rank == 0 else None, part)

    parts = [torch.zeros(1) for _ in range(ranks)] if rank == 0 else None
    dist.gather(own, parts, dst=0)
    note("gather", own, torch.cat(parts) if parts else None)

    whole = torch.zeros(ranks)
    dist.all_gather_into_tensor(whole, own)
    note("all-gather", own, whole)

    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, mine.clone())
    note("reduce-scatter", mine, part)

    flat = mine.clone()
    dist.all_reduce(flat)
    note("all-reduce", mine, flat)

    swapped = torch.zeros(ranks)
    dist.all_to_all_single(swapped, mine)
    note("all-to-all", mine, swapped)
    return before_and_after


def _cells_of_all_ranks(cells: Tensor | None) -> Cells:
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, None if cells is None else cells.tolist())
    return gathered


def time_all_reduce(sizes: list[int], repeats: int = 5) -> list[float]:
    """Run on every rank; return the shortest time, in seconds, of torch's all-reduce for each size in bytes (fp32)."""
    seconds = []
    for size in sizes:
        flat = torch.zeros(max(1, size // 4))
        least = float("inf")
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(flat)
            least = min(least, time.perf_counter() - start)
        seconds.append(least)
    return seconds
