"""Train one small GPT on several ranks by any engine: losses a step, and the bytes each rank holds.

What `python -m llmlab.experiments data_parallel` and `python -m llmlab.experiments zero` run. Weights and batches
follow from the seed alone, and a step's batch is shared out over the ranks: any engine on any number of ranks should
give the losses of one process.

    B  sequences of a step, over all ranks     T  seq_len     N  ranks
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..base.errors import NotAvailable, SpecError, UnknownName
from ..ranks.launch import PATIENCE, RankFailed, launch
from ..specs.model import ModelSpec, model
from ..specs.run import Training

# 78 144 parameters. Every first dimension divides by 2 and 4 (FSDP2 cuts there), every unit by 2, 3 and 4.
TINY_GPT: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 384, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.05,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What is trained, and how; raises SpecError for what cannot be, so before any process starts."""

    ranks: int = 2
    engine: str = "scratch"
    stage: int = 0
    method: str = "buckets"  # of scratch at stage 0: naive, hooks, buckets
    steps: int = 20
    sequences: int = 12  # of a step, over all ranks
    seq_len: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        from ..techniques.data_parallel import METHODS
        from .engines import check

        check_sizes(self, TINY_GPT["n_positions"])
        if self.sequences % self.ranks:
            raise SpecError(f"ranks={self.ranks} does not divide sequences={self.sequences}: unequal shares of a batch")
        if self.method not in METHODS:
            raise SpecError(f"method={self.method!r} is not one of {', '.join(METHODS)}")
        check(self.engine, self.stage)
        if self.stage and self.ranks == 1:
            raise SpecError(f"stage={self.stage} with ranks=1 has nothing to share; give ranks >= 2 or stage=0")


def check_sizes(job: Any, positions: int) -> None:
    """Raise SpecError unless ranks, steps and sequences are counts, and seq_len fits the model's `positions`."""
    check_counts(job, "ranks", "steps", "sequences")
    check_seed(job)
    if not 2 <= job.seq_len <= positions:
        raise SpecError(f"seq_len={job.seq_len!r} is outside 2 <= seq_len <= {positions}")


def check_counts(job: Any, *names: str) -> None:
    """Raise SpecError unless each of these fields is a whole number from 1 on."""
    for name in names:
        value = getattr(job, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{name}={value!r} is not a whole number >= 1")


def check_seed(job: Any) -> None:
    """Raise SpecError unless the seed is one that `batch_seed` makes a seed of torch's generators of."""
    if isinstance(job.seed, bool) or not isinstance(job.seed, int) or not 0 <= job.seed < 2**31:
        raise SpecError(f"seed={job.seed!r} is not a whole number from 0 to {2**31 - 1}")


def tiny_gpt() -> ModelSpec:
    return model(TINY_GPT)


def train(job: Job) -> dict:
    """Train in this rank, one of a started group; return losses (nats a token, over all ranks) and this rank's bytes.

    Parameters and optimizer states are counted after the last step, gradients between its backward and its update.
    """
    import torch
    import torch.distributed as dist

    from ..architectures.gpt import GPT
    from ..data import tokens, windows
    from ..techniques.training_loop import batch_seed, next_token_loss
    from . import engines

    torch.manual_seed(job.seed)
    engine = engines.of(job.engine, GPT(tiny_gpt()), job.stage, job.method)
    ids = tokens(TINY_GPT["vocab_size"])
    share = job.sequences // job.ranks
    losses = []
    for step in range(job.steps):
        whole_BT = windows(ids, job.sequences, job.seq_len, batch_seed(job.seed, step))
        mine_BT = whole_BT[dist.get_rank() * share :][:share]
        loss = next_token_loss(engine.forward(mine_BT), mine_BT)
        engine.backward(loss)
        gradients = engine.gradients()
        engine.step()
        mean = loss.detach() / job.ranks  # shares are equal, so the mean of means is the mean
        dist.all_reduce(mean)
        losses.append(mean.item())
    held = {"parameters": engine.parameters(), "gradients": gradients, **engine.optimizer()}
    return {"losses": losses, "bytes": held, "sent": engine.sent()}


def run(job: Job, patience: float = PATIENCE) -> dict:
    """Launch the job's ranks; return its losses, and bytes and bytes sent by rank, with the formula's beside them."""
    ranks = launch(train, job.ranks, job, patience=patience)
    return {
        "engine": job.engine, "stage": job.stage, "ranks": job.ranks, "losses": ranks[0]["losses"],
        "bytes": [rank["bytes"] for rank in ranks], "sent": [rank["sent"] for rank in ranks], "formula": formula(job),
    }  # fmt: skip


def formula(job: Job) -> dict[str, int]:
    """Return the bytes a rank holds by llmlab.estimate."""
    from ..formulas.memory.states import states

    held = states(tiny_gpt(), Training(zero=job.stage, dp=job.ranks))
    return {"parameters": held.weights, "gradients": held.gradients, "optimizer": held.optimizer}


def main(technique: str, arguments: list[str] | None = None) -> None:
    """The command line of data_parallel and of zero."""
    parser = argparse.ArgumentParser(
        prog=f"python -m llmlab.experiments {technique}", description="Train a small GPT on several ranks."
    )
    parser.add_argument("--sequences", type=int, default=12, help="of a step, over all ranks (default 12)")
    if technique == "zero":
        parser.add_argument("--engine", default="scratch", help="scratch, ddp, fsdp or deepspeed")
        parser.add_argument("--stage", type=int, help="0 to 3 (default: 0 for ddp, else 3)")
    else:
        parser.add_argument("--engine", default="scratch", help="scratch or ddp")
        parser.add_argument("--method", default="buckets", help="of scratch: naive, hooks or buckets")

    def found(patience: float, **options: Any) -> dict:
        if options.get("stage", 0) is None or options["engine"] == "ddp":
            options["stage"] = 0 if options["engine"] == "ddp" else 3  # DDP is what the stages are held to
        return run(Job(**options), patience)

    command(parser, arguments, found, _table)


def command(
    parser: argparse.ArgumentParser, arguments: list[str] | None, found: Callable[..., dict], table: Callable
) -> None:
    """Add what every program on several ranks takes, print what `found(patience, **options)` gives, and exit.

    Exit code 2: it cannot be run as asked; 1: a rank failed.
    """
    parser.add_argument(
        "--ranks", type=int, default=parser.get_default("ranks") or 2, help="processes (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=PATIENCE, help="s a rank may let others wait (default 10)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    try:
        result = found(**options)
    except (SpecError, UnknownName, NotAvailable) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except RankFailed as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    print(json.dumps(result) if as_json else table(result))


def _table(found: dict) -> str:
    lines = loss_lines(found)
    for rank, (held, sent) in enumerate(zip(found["bytes"], found["sent"], strict=True)):
        lines.append(f"rank {rank}: {sizes(held)}" + (f"; {sent:,} bytes sent" if sent is not None else ""))
    return "\n".join([*lines, f"formula: {sizes(found['formula'])}"])


def loss_lines(found: dict) -> list[str]:
    """Return a line for the loss of each step of what a run found."""
    return [f"step {step:3}: {loss:.6f} nats a token" for step, loss in enumerate(found["losses"])]


def sizes(held: dict[str, int]) -> str:
    """Return bytes by what they are for as words."""
    return ", ".join(f"{kind} {size:,}" for kind, size in held.items()) + " bytes" if held else "nothing"
