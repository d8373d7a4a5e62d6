"""What the ZeRO page runs in real processes, in one launch: every engine's losses and bytes, and two of its knobs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..architectures.gpt import GPT
from ..engines.configs import DEEPSPEED_COMMON
from ..techniques.training_loop import next_token_loss
from ..techniques.zero import Zero
from .engines import ADAMW, local, quiet_deepspeed
from .train import TINY_GPT, Job, tiny_gpt, train

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
    """Run in each rank: the bytes of parameters that our stage 3 holds, at each gather and free of one step."""
    torch.manual_seed(0)
    model = GPT(tiny_gpt())
    shared = Zero(model, list(model.h), 3, torch.optim.AdamW, lr=1e-3)
    seen = [("start", shared.parameter_bytes())]
    for number, block in enumerate(model.h):
        mlp = block.get_submodule("mlp")
        mlp.register_forward_hook(lambda *_, n=number: seen.append((f"forward {n}", shared.parameter_bytes())))
        mlp.register_full_backward_hook(lambda *_, n=number: seen.append((f"backward {n}", shared.parameter_bytes())))
    ids = torch.randint(TINY_GPT["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(1))  # (B, T)
    shared.backward(next_token_loss(model(ids), ids))
    return [*seen, ("end", shared.parameter_bytes())]


def persistence(threshold: int) -> int:
    """Run in each rank: the bytes of parameters between steps of DeepSpeed's stage 3.

    Parameters of fewer elements than `threshold` (stage3_param_persistence_threshold) stay whole.
    """
    quiet_deepspeed()
    import deepspeed as library

    torch.manual_seed(0)
    model = GPT(tiny_gpt())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold},
        **DEEPSPEED_COMMON,
    }
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)
    ids = torch.randint(TINY_GPT["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(1))  # (B, T)
    engine.backward(next_token_loss(engine(ids), ids))
    engine.step()
    parameters = list(engine.module.parameters())
    return local([*(p.ds_tensor for p in parameters), *(p.data for p in parameters)])


def knobs() -> dict[str, float]:
    """Return DeepSpeed's own defaults of what stage 3 may hold at once, in elements."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    names = {field.alias or name: field.default for name, field in DeepSpeedZeroConfig.model_fields.items()}
    return {name: float(names[name]) for name in KNOBS}


def chapter(steps: int, with_deepspeed: bool) -> dict[str, Any]:
    """All that the page runs; DeepSpeed's part where it is installed."""
    ranks = dist.get_world_size()
    runs = {**RUNS, **(DEEPSPEED if with_deepspeed else {})}
    found: dict[str, Any] = {
        name: train(Job(ranks=ranks, engine=engine, stage=stage, steps=steps)) for name, (engine, stage) in runs.items()
    }
    return {
        "runs": found,
        "over the step": over_the_step(),
        "persistence": {n: persistence(n) for n in (0, 1000, 100_000)} if with_deepspeed else {},
        "knobs": knobs() if with_deepspeed else {},
    }
