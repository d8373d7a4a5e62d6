"""Run schedules in processes on this machine, and measure when each rank runs which operation."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...data import tokens, windows
from ...ranks.launch import launch
from ..architectures.llama import Llama
from ..techniques.pipeline import Stage, run
from ..techniques.pipeline_schedules import Op, Span, schedule
from ..techniques.training_loop import next_token_loss
from .job import SEQ_LEN, TINY_LLAMA

# Large enough that a stage takes some ms per micro-batch, much longer than a message between processes.
TIMED_LLAMA = {**TINY_LLAMA, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}


def in_this_rank(plans: dict[str, list]) -> dict[str, list]:
    """Run each plan twice, and return the spans of the second run. A plan has the arguments of `schedule`, without the
    number of ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ids = tokens(TIMED_LLAMA["vocab_size"])
    spans_by_plan = {}
    for name, (kind, micro_batches, virtual_stages) in plans.items():
        torch.manual_seed(0)
        whole = Llama.from_spec(TIMED_LLAMA)
        stages = {n: Stage(whole, n, ranks * virtual_stages) for n in range(rank, ranks * virtual_stages, ranks)}
        plan = schedule(kind, ranks, micro_batches, virtual_stages)
        batch = list(windows(ids, micro_batches, SEQ_LEN)[:, None])  # one sequence per micro-batch
        for _ in range(2):  # the first one also allocates
            spans: list[Span] = []
            dist.barrier()
            run(plan, stages, batch, next_token_loss, (1, SEQ_LEN, TIMED_LLAMA["hidden_size"]), spans)
        spans_by_plan[name] = [[*span.op, span.start, span.end] for span in spans]
    return spans_by_plan


def timed(plans: dict[str, tuple[str, int, int]], ranks: int = 2) -> dict[str, list[Span]]:
    """Return the spans of each plan, {name: (schedule, micro-batches, virtual stages)}, in ms since the start of its
    first operation."""
    by_rank = launch(in_this_rank, ranks, {name: list(plan) for name, plan in plans.items()}, patience=60)
    spans_by_plan = {}
    for name in plans:
        first = min(span[3] for rank in by_rank for span in rank[name])
        spans_by_plan[name] = [
            Span(Op(*op), rank, 1e3 * (start - first), 1e3 * (end - first))
            for rank, spans in enumerate(by_rank)
            for *op, start, end in spans[name]
        ]
    return spans_by_plan
