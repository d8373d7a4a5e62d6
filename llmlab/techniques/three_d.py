"""Three-dimensional parallelism from scratch: each rank has a share of some layers, and sees some of the sequences.

    python -m llmlab.techniques.three_d --ranks 4 --tp 2 --pp 2 --steps 20 --json

The ranks are a mesh, pp × dp × tp, neighbours along the last (Megatron-LM, arXiv 2104.04473, section 3). The three
techniques are those of their chapters, each on its own group of ranks:

    tensor_parallel.shard   cuts matrices over the ranks of `tp`
    pipeline.run            passes micro-batches along the ranks of `pp`
    an all-reduce           averages gradients over the ranks of `dp`, once, after the last micro-batch
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from . import pipeline_schedules
from .launch import PATIENCE, launch
from .rank_training import check_counts, check_sizes, command
from .split_training import TINY_LLAMA, show, tiny_llama


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
        from . import pipeline, tensor_parallel

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
    """Train in this rank, one of a started group; return losses (nats a token over all ranks; None on ranks of other
    stages than the last), bytes, and this rank's place along (pp, dp, tp)."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ..data import tokens, windows
    from ..models.llama import Llama
    from . import pipeline, tensor_parallel
    from .engines import ADAMW, local, states
    from .training import batch_seed

    mesh = init_device_mesh("cpu", (job.pp, job.dp, job.tp), mesh_dim_names=("pp", "dp", "tp"))
    across, down = mesh.get_group("tp"), mesh.get_group("dp")
    place = mesh.get_coordinate()
    assert place is not None  # all ranks are in the mesh
    stage, copy, _ = place
    line = dist.get_process_group_ranks(mesh.get_group("pp"))  # those of this rank's pipeline, first stage first

    torch.manual_seed(job.seed)
    whole = tensor_parallel.shard(Llama(tiny_llama()), group=across)
    mine = pipeline.Stage(whole, stage, job.pp)
    del whole
    plan = pipeline_schedules.schedule(job.schedule, job.pp, job.micro_batches, 1)
    share = job.sequences // job.dp
    shape = (share // job.micro_batches, job.seq_len, TINY_LLAMA["hidden_size"])
    optimizer = torch.optim.AdamW(mine.parameters(), **ADAMW)
    ids, losses = tokens(TINY_LLAMA["vocab_size"]), []
    for step in range(job.steps):
        batch = windows(ids, job.sequences, job.seq_len, batch_seed(job.seed, step))[copy * share :][:share]
        micro_batches = list(batch.chunk(job.micro_batches))

        def loss(logits: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            return tensor_parallel.next_token_loss(logits, given, across)

        found = pipeline.run(plan, {stage: mine}, micro_batches, loss, shape, ranks=line)
        for gradient in [p.grad for p in mine.parameters() if p.grad is not None]:
            dist.all_reduce(gradient, group=down)
            gradient.div_(job.dp)  # shares are equal, so the mean of means is the mean
        mean = torch.tensor(0.0 if found is None else found / job.dp)
        dist.all_reduce(mean, group=down)
        losses.append(None if found is None else mean.item())
        gradients = local(p.grad for p in mine.parameters())
        optimizer.step()
        optimizer.zero_grad()
    held = {"parameters": local(mine.parameters()), "gradients": gradients, **states(optimizer)}
    return {"losses": losses, "bytes": held, "place": list(place)}


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
        prog="python -m llmlab.techniques.three_d", description="Train a small Llama on a mesh of dp × tp × pp ranks."
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


if __name__ == "__main__":
    main()
