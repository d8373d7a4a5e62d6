"""The experiments of the chapter on tensor parallelism: a count of collectives, and several jobs on the same ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from ...specs.model import model
from ..architectures.llama import Llama
from ..techniques.tensor_parallel import next_token_loss, shard
from .job import TINY_LLAMA, Job
from .train import train

COLLECTIVES = {"allreduce": "all-reduce", "allgather": "all-gather", "reduce_scatter_base": "reduce-scatter"}


def train_each(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Train one job after the other in this rank, and return the results. All use the whole group of ranks."""
    return [train(job) for job in jobs]


def collectives_per_layer(sequence_parallel: bool) -> dict[str, int]:
    """Return how often a layer calls each collective, in a forward and a backward pass together.

    This is the difference between models of four and of two layers, halved, so the embedding, the head and the loss
    drop out. A group of one rank calls as many collectives as a larger one.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        four, two = (_collectives(layers, sequence_parallel) for layers in (4, 2))
    finally:
        dist.destroy_process_group()
    return {name: (four.get(name, 0) - two.get(name, 0)) // 2 for name in COLLECTIVES.values()}


def _collectives(layers: int, sequence_parallel: bool) -> dict[str, int]:
    """Return how often a small Llama with `layers` layers calls each collective."""
    split = shard(Llama(model({**TINY_LLAMA, "num_hidden_layers": layers})), sequence_parallel)
    ids_BS = torch.zeros(1, 8, dtype=torch.long)
    with warnings.catch_warnings(), CommDebugMode() as counted:
        warnings.simplefilter("ignore")  # no input of the model requires a gradient; newer torch renames a collective
        next_token_loss(split(ids_BS), ids_BS).backward()
    calls = {str(kind).rpartition(".")[2].strip("_"): number for kind, number in counted.get_comm_counts().items()}
    return {COLLECTIVES[name]: number for name, number in calls.items()}
