"""Train one small Llama on a mesh of ranks: `python -m llmlab.experiments three_d --ranks 4 --tp 2 --pp 2`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from ..base.errors import SpecError
from ..ranks.launch import PATIENCE, launch
from ..techniques import pipeline_schedules
from .train import check_counts, check_sizes, command
from .train_split import TINY_LLAMA, show, tiny_llama


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is cut; raises SpecError for what cannot be, so before any process starts."""

    ranks: int = 4
    tp: int = 2
    pp: int = 2
    steps: int = 20
    sequences: int = 8  # of a step, over all ranks
    micro_batches: int = 4  # of a pipeline
    seq_len: int = 64
    schedule: str = "1f1b"
    seed: int = 0

    def __post_init__(self) -> None:
        from ..techniques import pipeline, tensor_parallel

        check_sizes(self, TINY_LLAMA["max_position_embeddings"])
        check_counts(self, "tp", "pp")
        if self.ranks % (self.tp * self.pp):
            given = f"ranks={self.ranks} cannot be dp × tp={self.tp} × pp={self.pp}"
            raise SpecError(f"{given}; give ranks a multiple of {self.tp * self.pp}, or other degrees")
        try:
            tensor_parallel.check(tiny_llama(), self.tp)
            pipeline.check(tiny_llama(), self.pp)
        except SpecError as error:
            raise SpecError(f"{error} (dp={self.dp} × tp={self.tp} × pp={self.pp})") from None
        pipeline_schedules.schedule(self.schedule, self.pp, self.micro_batches, 1)
        if self.sequences % (self.dp * self.micro_batches):
            given = f"dp={self.dp} × micro_batches={self.micro_batches}"
            raise SpecError(f"{given} does not divide sequences={self.sequences}: unequal shares of a batch")

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp)


def train(job: Job) -> dict:
    """Train in this rank, one of a started group; return losses (nats per token over all ranks; None on ranks of other
    stages than the last), bytes, and this rank's place along (pp, dp, tp)."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from ..architectures.llama import Llama
    from ..data import tokens, windows
    from ..techniques.three_d import Share
    from ..techniques.training_loop import batch_seed
    from .engines import ADAMW, local, states

    torch.manual_seed(job.seed)
    mesh = init_device_mesh("cpu", (job.pp, job.dp, job.tp), mesh_dim_names=("pp", "dp", "tp"))
    share = Share(Llama(tiny_llama()), mesh, job.schedule, job.micro_batches)
    parameters = list(share.stage.parameters())
    optimizer = torch.optim.AdamW(parameters, **ADAMW)
    ids, losses = tokens(TINY_LLAMA["vocab_size"]), []
    for step in range(job.steps):
        losses.append(share.forward_backward(windows(ids, job.sequences, job.seq_len, batch_seed(job.seed, step))))
        gradients = local(p.grad for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
    held = {"parameters": local(parameters), "gradients": gradients, **states(optimizer)}
    return {"losses": losses, "bytes": held, "place": list(share.place)}


def run_job(job: Job, patience: float = PATIENCE) -> dict:
    """Launch the job's ranks; return its losses, each rank's place and the bytes it holds, and the whole model's."""
    ranks = launch(train, job.ranks, job, patience=patience)
    whole = 4 * tiny_llama().parameters
    return {
        "ranks": job.ranks, "mesh": {"pp": job.pp, "dp": job.dp, "tp": job.tp}, "losses": ranks[-1]["losses"],
        "places": [rank["place"] for rank in ranks], "bytes": [rank["bytes"] for rank in ranks],
        "whole": {"parameters": whole, "gradients": whole, "optimizer": 2 * whole},
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m llmlab.experiments three_d", description="Train a small Llama on a mesh of dp × tp × pp ranks."
    )
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks (default 2)")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default 2); the rest is data parallel")
    parser.add_argument("--sequences", type=int, default=8, help="of a step, over all ranks (default 8)")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a pipeline (default 4)")
    parser.add_argument("--schedule", default="1f1b", help=", ".join(pipeline_schedules.SCHEDULES))

    def found(patience: float, **options: Any) -> dict:
        return run_job(Job(**options), patience)

    parser.set_defaults(ranks=4)
    command(parser, arguments, found, show)

