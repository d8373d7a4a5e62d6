"""The positions of ranks in a mesh of data, tensor, pipeline and context parallelism.

    axis            tensor    context    data           pipeline          experts
    ranks apart     1         tp         tp · cp        tp · cp · dp      tp · cp, among the data-parallel ones

This is Megatron-Core's order (parallel_state.py, initialize_model_parallel: "tp-cp-ep-dp-pp"). Neighbours communicate
most often, so that this communication stays on a node's links. Llama 3 (arXiv 2407.21783, section 3.3.2) puts data
parallelism last.
"""

from __future__ import annotations

from ..base.errors import SpecError
from .run import Training

AXES = ("tp", "cp", "dp", "pp")  # neighbours first


def stride(run: Training, axis: str) -> int:
    """Return the distance in ranks between a rank and the next one along `axis`: "tp", "cp", "dp", "pp" or "ep".

    >>> stride(Training(tp=8, pp=4, dp=2), "pp")
    16
    """
    before = AXES.index("dp" if axis == "ep" else axis)
    distance = 1
    for inner in AXES[:before]:
        distance *= getattr(run, inner)
    return distance


def coordinates(run: Training, rank: int) -> dict[str, int]:
    """Return the position of `rank` along each axis.

    >>> coordinates(Training(tp=2, dp=2, pp=2), 5)
    {'tp': 1, 'cp': 0, 'dp': 0, 'pp': 1}
    """
    if not 0 <= rank < run.world_size:
        raise SpecError(f"rank={rank} is not one of the {run.world_size} of dp × tp × pp × cp")
    return {axis: rank // stride(run, axis) % getattr(run, axis) for axis in AXES}


def ranks_along(run: Training, axis: str, rank: int = 0) -> list[int]:
    """Return the ranks that communicate along `axis` with `rank`, including itself.

    >>> ranks_along(Training(tp=2, dp=2, pp=2), "dp", 5)
    [5, 7]
    """
    distance, size = stride(run, axis), getattr(run, axis)
    first = rank - rank // distance % size * distance
    return [first + i * distance for i in range(size)]
