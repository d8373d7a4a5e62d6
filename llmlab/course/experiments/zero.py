"""Train a small GPT with every implementation of ZeRO in real processes: losses, bytes, and DeepSpeed's settings."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...base.compat import symbol
from ..techniques.training_loop import next_token_loss
from ..techniques.zero import Zero
from .data_parallel import batch, new_gpt
from .engines import deepspeed, local
from .train import make_job, train

RUNS = {
    "DDP": ("ddp", 0),
    "scratch, stage 1": ("scratch", 1),
    "scratch, stage 2": ("scratch", 2),
    "scratch, stage 3": ("scratch", 3),
    "FSDP2": ("fsdp", 3),
}
DEEPSPEED = {f"DeepSpeed, stage {stage}": ("deepspeed", stage) for stage in (1, 2, 3)}

KNOBS = (
    "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold", "reduce_bucket_size",
)  # fmt: skip


def over_the_step() -> list[tuple[str, int]]:
    """Return the bytes of parameters in this rank's memory at several moments of a step of our stage 3."""
    model = new_gpt()
    shared = Zero(model, list(model.h), 3, torch.optim.AdamW, lr=1e-3)
    moments = [("start", shared.parameter_bytes())]

    def note(moment: str) -> None:
        moments.append((moment, shared.parameter_bytes()))

    for number, block in enumerate(model.h):
        mlp = block.get_submodule("mlp")
        mlp.register_forward_hook(lambda *_, n=number: note(f"forward {n}"))
        mlp.register_full_backward_hook(lambda *_, n=number: note(f"backward {n}"))
    ids = batch(2)
    shared.backward(next_token_loss(model(ids), ids))
    return [*moments, ("end", shared.parameter_bytes())]


def persistence(threshold: int) -> int:
    """Return the bytes of parameters on this rank between the steps of DeepSpeed's stage 3.

    Parameters with at most `threshold` elements (stage3_param_persistence_threshold) stay whole.
    """
    model = new_gpt()
    engine = deepspeed(model, 3, stage3_param_persistence_threshold=threshold)
    engine.forward_backward(batch(2 * dist.get_world_size()))
    engine.step()
    return engine.parameters() + local(p.data for p in model.parameters())


def knobs() -> dict[str, float]:
    """Return the defaults of DeepSpeed's limits for stage 3, in elements."""
    DeepSpeedZeroConfig = symbol("deepspeed.runtime.zero.config.DeepSpeedZeroConfig")
    names = {field.alias or name: field.default for name, field in DeepSpeedZeroConfig.model_fields.items()}
    return {name: float(names[name]) for name in KNOBS}


def chapter(steps: int, with_deepspeed: bool) -> dict[str, Any]:
    """Run all experiments of the page in this rank, so that one launch is enough; `with_deepspeed` if installed."""
    ranks = dist.get_world_size()
    runs = {**RUNS, **(DEEPSPEED if with_deepspeed else {})}
    return {
        "runs": {
            name: train(make_job("zero", ranks, 12, engine=engine, stage=stage, steps=steps))
            for name, (engine, stage) in runs.items()
        },
        "over the step": over_the_step(),
        "persistence": {n: persistence(n) for n in (0, 1000, 100_000)} if with_deepspeed else {},
        "knobs": knobs() if with_deepspeed else {},
    }
