"""What DeepSpeed's hooks take of the CPU, per module and per parameter, beside an operator of a plain block.

    python -m benchmarks.time.deepspeed_hooks  # prints; about a minute

A real engine on one process, on many layers of tiny tensors, forward and backward, against the same layers without it:
layers without a parameter, with one that stays whole (stage3_param_persistence_threshold) and with one that is gathered
and whose gradient fills the bucket, as "auto" sizes have it for any matrix. Two depths, so that what an engine takes
once per step is not counted; the least CPU time of this thread in many rounds, in which all take turns. An operator:
transformers' Llama on tiny tensors, forward, over the operators that a block has. What follows is `FORWARD`, `BACKWARD`
and `HERE` in llmlab/formulas/time/host.py: seconds of a quiet machine, which on a busy one are twice as many; their
ratio stays. DeepSpeed 0.12.4, of the time of the published runs, gave half the seconds and, in operators, the same
within 30 %.

Then the update: what engine.step takes for each parameter, and beside them, with half weights, a loss scale that stays
and clipping. What follows is `JOINED` there. On one process nothing is sent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.provenance import provenance, titled_table
from llmlab.course.experiments.engines import quiet_deepspeed
from llmlab.formulas.time.host import TRANSFORMERS
from llmlab.hardware.this_machine import host

WIDTH, SHALLOW, DEEP = 32, 16, 48
KINDS = ("no parameter", "kept whole", "gathered")
VIEW = 0.15  # of an operator, as in benchmarks/time/efficiencies.py
Run = Callable[[], tuple[float, float]]  # seconds forward and backward


class Layer(nn.Module):
    """A layer of one operator, with a parameter as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        shape = {"no parameter": None, "kept whole": (WIDTH,), "gathered": (WIDTH, WIDTH)}[kind]
        self.weight = nn.Parameter(torch.ones(shape)) if shape else None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return x * 1.0
        return x * self.weight if self.weight.dim() == 1 else x @ self.weight


class Layers(nn.Module):
    """`depth` layers of a `kind` after a linear one, summed."""

    def __init__(self, kind: str, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def timed(forward: Callable[[], Tensor], backward: Callable[[Tensor], Any]) -> tuple[float, float]:
    """Return the CPU seconds of this thread, forward and backward; on a CPU autograd's engine runs in it too."""
    start = time.thread_time()
    loss = forward()
    middle = time.thread_time()
    backward(loss)
    return middle - start, time.thread_time() - middle


def layers(kind: str, depth: int, stage: int) -> Run:
    """Return a run of `depth` layers, with DeepSpeed's engine at `stage`, or without one at 0."""
    x, model = torch.randn(2, WIDTH), Layers(kind, depth)
    if not stage:
        return lambda: timed(lambda: model(x), Tensor.backward)
    import deepspeed

    zero = {"stage": stage, "stage3_param_persistence_threshold": 2 * WIDTH, "reduce_bucket_size": WIDTH**2,
            "stage3_prefetch_bucket_size": int(0.9 * WIDTH**2)}  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 10_000, "zero_optimization": zero,
              "zero_allow_untested_optimizer": True}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    return lambda: timed(lambda: engine(x), engine.backward)


def updated(kind: str, depth: int, stage: int) -> Callable[[], float]:
    """Return a run of a step of `depth` layers in fp16, of which the seconds of the update count."""
    import deepspeed

    x, model = torch.randn(2, WIDTH, dtype=torch.float16), Layers(kind, depth)
    for layer in model.layers:
        if layer.weight.dim() == 2:
            layer.weight.data.copy_(torch.eye(WIDTH))  # else numbers grow beyond fp16's, and no step is taken
    zero = {"stage": stage, "stage3_param_persistence_threshold": 2 * WIDTH}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
              "fp16": {"enabled": True, "loss_scale": 128}, "gradient_clipping": 1.0}  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def run() -> float:
        engine.backward(engine(x))
        start = time.thread_time()
        engine.step()
        return time.thread_time() - start

    return run


def updates(rounds: int, operator: float) -> list[list[str]]:
    """Return what an update takes at each stage, in operators: for a parameter of each kind, and besides."""
    keys = [(stage, kind, depth) for stage in (0, 1, 2, 3) for kind in KINDS[1:] for depth in (SHALLOW, DEEP)]
    runs = {(stage, kind, depth): updated(kind, depth, stage) for stage, kind, depth in keys}
    least = dict.fromkeys(runs, float("inf"))
    for each in range(3 + rounds):
        for key, run in runs.items():
            taken = run()
            if each >= 3:
                least[key] = min(least[key], taken)
    lines = []
    for stage in (0, 1, 2, 3):
        whole, gathered = ((least[stage, kind, DEEP] - least[stage, kind, SHALLOW]) / (DEEP - SHALLOW)
                           for kind in KINDS[1:])  # fmt: skip
        besides = least[stage, KINDS[1], SHALLOW] - (SHALLOW + 2) * whole
        lines.append([str(stage), *(f"{s / operator:.1f}" for s in (whole, gathered)), f"{besides / operator:.0f}"])
    return lines


def llama(depth: int) -> Run:
    """Return a run of a Llama of `depth` tiny blocks."""
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
                         vocab_size=64, num_hidden_layers=depth, use_cache=False)  # fmt: skip
    model, ids = LlamaForCausalLM(config).train(), torch.randint(0, 64, (1, 8))
    return lambda: timed(lambda: model(input_ids=ids, labels=ids).loss, Tensor.backward)


def measured(rounds: int) -> tuple[float, dict[tuple[str, int], tuple[float, float]]]:
    """Return the seconds of an operator, and those that a layer takes longer at each stage, forward and backward."""
    runs = {(kind, stage, depth): layers(kind, depth, stage)
            for kind in KINDS for stage in (0, 1, 2, 3) for depth in (SHALLOW, DEEP)}  # fmt: skip
    runs |= {("llama", 0, depth): llama(depth) for depth in (SHALLOW // 4, DEEP // 4)}
    least = dict.fromkeys(runs, (float("inf"), float("inf")))
    for each in range(3 + rounds):
        for key, run in runs.items():
            taken = run()
            if each >= 3:  # DeepSpeed's first steps record what it later prefetches
                least[key] = min(least[key][0], taken[0]), min(least[key][1], taken[1])

    def one(kind: str, stage: int, scale: int = 1) -> list[float]:
        pairs = zip(least[kind, stage, DEEP // scale], least[kind, stage, SHALLOW // scale], strict=True)
        return [(deep - shallow) / (DEEP - SHALLOW) * scale for deep, shallow in pairs]

    block = TRANSFORMERS["rmsnorm"]
    operator = one("llama", 0, 4)[0] / (block.kernels + VIEW * block.views)
    return operator, {(kind, stage): (with_it[0] - without[0], with_it[1] - without[1])
                      for kind in KINDS for stage in (1, 2, 3)
                      for with_it, without in [(one(kind, stage), one(kind, 0))]}  # fmt: skip


@click.command()
@click.option("--rounds", default=40, show_default=True, help="Of which the fastest counts.")
def main(rounds: int) -> None:
    """Measure, on this machine's CPU."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "1"}  # else DeepSpeed asks the system, at every collective
    quiet_deepspeed()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    operator, longer = measured(rounds)
    steps = updates(rounds, operator)
    torch.distributed.destroy_process_group()
    lines = [[str(stage), kind, *(f"{1e6 * s:.0f} µs, {s / operator:.1f}" for s in both)]
             for (kind, stage), both in sorted(longer.items(), key=lambda each: each[0][1])]  # fmt: skip
    title = f"What a layer takes longer, in time and in operators of {1e6 * operator:.2f} µs"
    print("\n".join(titled_table(title, ["stage", "layer", "forward", "backward"], lines)))
    title = "What an update takes, in operators"
    print("\n".join(titled_table(title, ["stage", "per parameter kept whole", "gathered", "besides"], steps)))
    print(provenance("deepspeed", "torch", "transformers"), host().cpu)


if __name__ == "__main__":
    main()
