"""Train a small model on several ranks, by any engine: losses of each step, and bytes on each rank.

`python -m llmlab.course.experiments` runs it for data_parallel, zero, tensor_parallel, pipeline and three_d. The seed
determines weights and batches, so any engine on any number of ranks should compute the losses of one process.
"""

from __future__ import annotations

from typing import Any

from ...base.errors import SpecError, check_counts
from ...ranks.launch import PATIENCE, launch
from ...specs.run import Training
from ..techniques.pipeline_schedules import SCHEDULES
from .command import LAUNCH, Options, command, loss_lines, sizes
from .job import SEQ_LEN, Job, tiny_gpt, tiny_llama

REPLICAS = ("data_parallel", "zero")  # these train copies of a GPT on shares of the sequences; others divide a Llama


def train(job: Job) -> dict[str, Any]:
    """Train in this rank of a process group.

    Returns the losses (nats per token of the whole batch; None on ranks that do not compute it), the bytes on this
    rank, the bytes it sent if the engine counts them, and its coordinates (pp, dp, tp) in a mesh. Parameters and
    optimizer states are counted after the last step, and gradients between its backward pass and its update.
    """
    import torch

    from ...data import tokens, windows
    from ..techniques.training_loop import batch_seed
    from .engines import replica
    from .model_engines import share

    torch.manual_seed(job.seed)
    engine = replica(job) if job.experiment in REPLICAS else share(job)
    ids, losses = tokens(tiny_gpt().vocab), []  # the vocabulary of both models
    for step in range(job.steps):
        batch_BT = windows(ids, job.run.global_batch, job.run.seq_len, batch_seed(job.seed, step))
        losses.append(engine.forward_backward(batch_BT))
        gradients = engine.gradients()
        engine.step()
    resident_bytes = {"parameters": engine.parameters(), "gradients": gradients, **engine.optimizer()}
    return {"losses": losses, "bytes": resident_bytes, "sent": engine.sent(), "place": engine.place}


def check(job: Job) -> None:
    """Raise SpecError for a job that its engine cannot run, NotAvailable where the engine is not installed."""
    from . import engines, model_engines

    if job.experiment in REPLICAS:
        engines.check(job)
    else:
        model_engines.check(job)


def run_job(job: Job, patience: float = PATIENCE) -> dict[str, Any]:
    """Launch the job's ranks; return the losses, the bytes on each rank, and those of the formula or the whole model.

    Raises the errors of `check` before any process starts, and RankFailed if a rank fails.
    """
    check(job)
    run = job.run
    ranks = launch(train, run.world_size, job, patience=patience)
    losses, resident_bytes = ranks[-1]["losses"], [rank["bytes"] for rank in ranks]
    if job.experiment in REPLICAS:
        return {
            "engine": job.engine, "stage": run.zero, "ranks": run.world_size, "losses": losses, "bytes": resident_bytes,
            "sent": [rank["sent"] for rank in ranks], "formula": formula(run),
        }  # fmt: skip
    parameters = 4 * tiny_llama().parameters
    whole = {"parameters": parameters, "gradients": parameters, "optimizer": 2 * parameters}
    if job.experiment == "three_d":
        return {
            "ranks": run.world_size, "mesh": {"pp": run.pp, "dp": run.dp, "tp": run.tp}, "losses": losses,
            "places": [rank["place"] for rank in ranks], "bytes": resident_bytes, "whole": whole,
        }  # fmt: skip
    return {
        "technique": job.experiment, "engine": job.engine, "ranks": run.world_size, "losses": losses,
        "bytes": resident_bytes, "whole": whole,
    }  # fmt: skip


def formula(run: Training) -> dict[str, int]:
    """Return the bytes that llmlab.estimate predicts for a rank of the small GPT."""
    from ...formulas.memory.states import states

    expected = states(tiny_gpt(), run)
    return {"parameters": expected.weights, "gradients": expected.gradients, "optimizer": expected.optimizer}


# ---- the command line

EXPERIMENTS: dict[str, tuple[str, Options]] = {
    "data_parallel": ("Train a small GPT on several ranks.", {
        "--sequences": (12, "of a step, over all ranks (default 12)"),
        "--engine": ("scratch", "scratch or ddp"),
        "--method": ("buckets", "of scratch: naive, hooks or buckets"),
        **LAUNCH,
    }),
    "zero": ("Train a small GPT on several ranks.", {
        "--sequences": (12, "of a step, over all ranks (default 12)"),
        "--engine": ("scratch", "scratch, ddp, fsdp or deepspeed"),
        "--stage": (int, "0 to 3 (default: 0 for ddp, else 3)"),
        **LAUNCH,
    }),
    "tensor_parallel": ("Train a small Llama that is cut over ranks.", {
        "--sequences": (8, "of a step (default 8)"),
        "--engine": ("scratch", "scratch or torch"),
        "--sequence-parallel": (False, "cut the rest by tokens"),
        **LAUNCH,
    }),
    "pipeline": ("Train a small Llama that is cut over ranks.", {
        "--sequences": (8, "of a step (default 8)"),
        "--engine": ("scratch", "scratch or torch"),
        "--schedule": ("1f1b", ", ".join(SCHEDULES)),
        "--micro-batches": (4, "of a step (default 4)"),
        "--virtual-stages": (1, "stages per rank, of interleaved"),
        **LAUNCH,
    }),
    "three_d": ("Train a small Llama on a mesh of dp × tp × pp ranks.", {
        "--tp": (2, "tensor-parallel ranks (default 2)"),
        "--pp": (2, "pipeline stages (default 2); the rest is data parallel"),
        "--sequences": (8, "of a step, over all ranks (default 8)"),
        "--micro-batches": (4, "of a pipeline (default 4)"),
        "--schedule": ("1f1b", ", ".join(name for name in SCHEDULES if name != "interleaved")),  # one stage per rank
        **LAUNCH,
        "--ranks": (4, "processes (default 4)"),
    }),
}  # fmt: skip


def main(arguments: list[str] | None, experiment: str) -> None:
    """The command line of the five experiments."""
    description, options = EXPERIMENTS[experiment]

    def run(patience: float, **values: Any) -> dict[str, Any]:
        return run_job(make_job(experiment, **values), patience)

    command(experiment, description, options, run, arguments, show)


def make_job(
    experiment: str, ranks: int, sequences: int, micro_batches: int = 1, tp: int = 1, pp: int = 1,
    stage: int | None = 0, sequence_parallel: bool = False, **settings: Any,
) -> Job:  # fmt: skip
    """Return the job for these options of the command line, with a Training for its ranks and sequences."""
    check_counts(ranks=ranks, sequences=sequences, micro_batches=micro_batches, tp=tp, pp=pp)
    tp = ranks if experiment == "tensor_parallel" else tp
    pp = ranks if experiment == "pipeline" else pp
    if ranks % (tp * pp):
        mesh = f"ranks={ranks} cannot be dp × tp={tp} × pp={pp}"
        raise SpecError(f"{mesh}; give ranks a multiple of {tp * pp}, or other degrees")
    dp = ranks // (tp * pp)
    if sequences % (dp * micro_batches):
        parts = f"ranks={ranks}" if experiment in REPLICAS else f"dp={dp} × micro_batches={micro_batches}"
        raise SpecError(f"{parts} does not divide sequences={sequences}: unequal shares of a batch")
    if stage is None or settings.get("engine") == "ddp":  # the stages are compared with DDP
        stage = 0 if settings.get("engine") == "ddp" else 3
    if stage and dp == 1:
        raise SpecError(f"stage={stage} with ranks={ranks} has nothing to share; give ranks >= 2 or stage=0")
    run = Training(
        micro_batch=sequences // (dp * micro_batches), seq_len=SEQ_LEN, accumulation=micro_batches, zero=stage,
        dp=dp, tp=tp, pp=pp, sequence_parallel=sequence_parallel and tp > 1,
    )  # fmt: skip
    return Job(experiment, run, **settings)


def show(result: dict[str, Any]) -> str:
    """Return the losses, and the bytes on each rank and of the formula or the whole model, as lines."""
    lines = loss_lines(result)
    for rank, resident_bytes in enumerate(result["bytes"]):
        sent = result["sent"][rank] if "sent" in result else None
        lines.append(f"rank {rank}: {sizes(resident_bytes)}" + (f"; {sent:,} bytes sent" if sent is not None else ""))
    reference = "formula" if "formula" in result else "whole"
    return "\n".join([*lines, f"{reference}: {sizes(result[reference])}"])
