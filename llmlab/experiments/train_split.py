"""Train one small Llama that is cut over ranks, by tensor or by pipeline: losses a step, and the bytes each rank holds.

What `python -m llmlab.experiments tensor_parallel` and `python -m llmlab.experiments pipeline` run. Weights and batches
follow from the seed alone: however the model is cut, the losses should be those of one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.errors import SpecError
from ..ranks.launch import PATIENCE, launch
from ..specs.model import ModelSpec, model
from ..techniques.pipeline_schedules import SCHEDULES, schedule
from .train import check_sizes, command, loss_lines, sizes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from ..architectures.llama import Llama

# Heads, key heads, MLP width, vocabulary and layers all divide by 2 and 4. Untied: first and last stage share nothing.
TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "initializer_range": 0.05,
}  # fmt: skip
TECHNIQUES = ("tensor_parallel", "pipeline")
ENGINES = ("scratch", "torch")


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is cut; raises SpecError for what cannot be, so before any process starts."""

    technique: str = "tensor_parallel"
    engine: str = "scratch"
    ranks: int = 2
    steps: int = 20
    sequences: int = 8  # of a step
    seq_len: int = 64
    seed: int = 0
    sequence_parallel: bool = False  # of tensor_parallel
    schedule: str = "1f1b"  # of pipeline, as the next two
    micro_batches: int = 4
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        from ..techniques import pipeline, tensor_parallel

        check_sizes(self, TINY_LLAMA["max_position_embeddings"])
        if self.technique not in TECHNIQUES:
            raise SpecError(f"technique={self.technique!r} is not one of {', '.join(TECHNIQUES)}")
        if self.engine not in ENGINES:
            raise SpecError(f"engine={self.engine!r} is not one of {', '.join(ENGINES)}")
        if self.technique == "tensor_parallel":
            tensor_parallel.check(tiny_llama(), self.ranks, self.seq_len if self.sequence_parallel else None)
            return
        schedule(self.schedule, self.ranks, self.micro_batches, self.virtual_stages)
        try:
            pipeline.check(tiny_llama(), self.ranks * self.virtual_stages)
        except SpecError as error:
            raise SpecError(f"ranks={self.ranks} × virtual_stages={self.virtual_stages}: {error}") from None
        if self.sequences % self.micro_batches:
            raise SpecError(f"micro_batches={self.micro_batches} does not divide sequences={self.sequences}")


def tiny_llama() -> ModelSpec:
    return model(TINY_LLAMA)


def train(job: Job) -> dict:
    """Train in this rank, one of a started group; return losses (nats a token; None on ranks that see none) and bytes.

    Parameters and optimizer states are counted after the last step, gradients between its backward and its update.
    """
    import torch

    from ..architectures.llama import Llama
    from ..data import tokens, windows
    from ..techniques.memory_anatomy import storage_bytes
    from ..techniques.training_loop import batch_seed
    from .engines import ADAMW, local, states

    torch.manual_seed(job.seed)
    whole = Llama(tiny_llama())
    build = {"tensor_parallel": _tensor_parallel, "pipeline": _pipeline}[job.technique]
    parameters, forward_backward = build(job, whole)
    del whole
    optimizer = torch.optim.AdamW(parameters, foreach=False, **ADAMW)  # foreach refuses a DTensor beside a Tensor
    ids = tokens(TINY_LLAMA["vocab_size"])
    losses = []
    for step in range(job.steps):
        losses.append(forward_backward(windows(ids, job.sequences, job.seq_len, batch_seed(job.seed, step))))
        gradients = local(p.grad for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
    held = {"parameters": local(parameters), "gradients": gradients, **states(optimizer)}
    assert job.engine == "torch" or held["parameters"] == storage_bytes(parameters)  # no view keeps a whole matrix
    return {"losses": losses, "bytes": held}


def _tensor_parallel(job: Job, whole: Llama) -> tuple[list[Parameter], Callable[[Tensor], float]]:
    from ..techniques import tensor_parallel
    from .engines_split import with_parallelize_module

    if job.engine == "torch":
        return with_parallelize_module(whole, job.sequence_parallel)
    shard = tensor_parallel.shard(whole, job.sequence_parallel)

    def forward_backward(ids_BT: Tensor) -> float:
        loss = tensor_parallel.next_token_loss(shard(ids_BT), ids_BT)
        loss.backward()
        if job.sequence_parallel:
            tensor_parallel.sum_norm_gradients(shard)
        return loss.item()

    return list(shard.parameters()), forward_backward


def _pipeline(job: Job, whole: Llama) -> tuple[list[Parameter], Callable[[Tensor], float | None]]:
    import torch.distributed as dist

    from ..techniques.pipeline import Stage, run
    from ..techniques.training_loop import next_token_loss
    from .engines_split import with_pipelining

    stages = job.ranks * job.virtual_stages
    mine = {number: Stage(whole, number, stages) for number in range(dist.get_rank(), stages, job.ranks)}
    parameters = [p for stage in mine.values() for p in stage.parameters()]
    shape = (job.sequences // job.micro_batches, job.seq_len, whole.spec.hidden)
    if job.engine == "torch":
        return parameters, with_pipelining(mine, stages, job.schedule, job.micro_batches)
    plan = schedule(job.schedule, job.ranks, job.micro_batches, job.virtual_stages)

    def forward_backward(ids_BT: Tensor) -> float | None:
        return run(plan, mine, list(ids_BT.chunk(job.micro_batches)), next_token_loss, shape)

    return parameters, forward_backward


def run_job(job: Job, patience: float = PATIENCE) -> dict:
    """Launch the job's ranks; return its losses, the bytes each rank holds, and those of the whole model."""
    ranks = launch(train, job.ranks, job, patience=patience)
    whole = 4 * tiny_llama().parameters
    return {
        "technique": job.technique, "engine": job.engine, "ranks": job.ranks, "losses": ranks[-1]["losses"],
        "bytes": [rank["bytes"] for rank in ranks],
        "whole": {"parameters": whole, "gradients": whole, "optimizer": 2 * whole},
    }  # fmt: skip


def main(technique: str, arguments: list[str] | None = None) -> None:
    """The command line of tensor_parallel and of pipeline."""
    parser = argparse.ArgumentParser(
        prog=f"python -m llmlab.experiments {technique}", description="Train a small Llama that is cut over ranks."
    )
    parser.add_argument("--sequences", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--engine", default="scratch", help="scratch or torch")
    if technique == "tensor_parallel":
        parser.add_argument("--sequence-parallel", action="store_true", help="cut the rest by tokens")
    else:
        parser.add_argument("--schedule", default="1f1b", help=", ".join(SCHEDULES))
        parser.add_argument("--micro-batches", type=int, default=4, help="of a step (default 4)")
        parser.add_argument("--virtual-stages", type=int, default=1, help="stages a rank, of interleaved")
    command(
        parser,
        arguments,
        lambda patience, **options: run_job(Job(technique=technique, **options), patience),
        show,
    )


def show(found: dict) -> str:
    """Return losses, and the bytes of each rank, as lines."""
    lines = [f"rank {rank}: {sizes(held)}" for rank, held in enumerate(found["bytes"])]
    return "\n".join([*loss_lines(found), *lines, f"whole: {sizes(found['whole'])}"])
