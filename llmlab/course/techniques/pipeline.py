"""Pipeline parallelism from scratch: each rank has some layers, and micro-batches pass through them one after another.

    python -m llmlab.course.experiments pipeline --ranks 2 --steps 20 --schedule 1f1b --json

`run` executes a schedule of pipeline_schedules.py op by op, and waits for the input of each.

    B  sequences of a micro-batch    T  tokens    C  hidden size    V  vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import SpecError
from ...specs.model import ModelSpec
from ...specs.stages import stage_layers
from ..architectures.llama import Llama, turn
from .pipeline_schedules import Op, Schedule, Span


def check(spec: ModelSpec, stages: int) -> None:
    """Raise SpecError if a stage would have no layer, or two stages would share a matrix."""
    stage_layers(spec.layers, stages, spec.name)
    if spec.tied and stages > 1:
        raise SpecError(f"{spec.name} ties its head to its embedding: first and last stage would share a matrix; untie")


class Stage(nn.Module):
    """Stage `number` of `stages` of a Llama: its blocks; the first also embeds, the last also has norm and head."""

    def __init__(self, model: Llama, number: int, stages: int) -> None:
        super().__init__()
        check(model.spec, stages)
        counts = stage_layers(model.spec.layers, stages)
        before = sum(counts[:number])
        self.head_dim, self.rope = model.spec.head_dim, model.rope
        self.embed_tokens = model.embed_tokens if number == 0 else None
        self.layers = model.layers[before : before + counts[number]]
        self.norm = model.norm if number == stages - 1 else None
        self.lm_head = model.lm_head if number == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Ids, (B, T), or the previous stage's output, (B, T, C) -> (B, T, C), or from the last stage (B, T, V)."""
        x_BTC = x if self.embed_tokens is None else self.embed_tokens(x)
        positions_BT = torch.arange(x.shape[1], device=x.device)[None]  # each stage computes the rotary angles
        turned = turn(self.rope, self.head_dim, positions_BT, x_BTC.dtype)
        for block in self.layers:
            x_BTC = block(x_BTC, turned, None, None)
        return x_BTC if self.norm is None or self.lm_head is None else self.lm_head(self.norm(x_BTC))


class WeightLater(torch.autograd.Function):
    """x · Wᵀ whose backward returns the input's gradient, and appends a function for the weight's to `later`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Linear, later: list[Callable[[], None]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module, ctx.later = module, later
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        module = ctx.module

        def weight_gradient() -> None:
            dweight = grad.flatten(0, -2).mT @ x.flatten(0, -2)
            module.weight.grad = dweight if module.weight.grad is None else module.weight.grad + dweight

        ctx.later.append(weight_gradient)
        return grad @ weight, None, None, None


def put_weights_off(stage: nn.Module) -> list[Callable[[], None]]:
    """Make every nn.Linear of `stage` defer its weight's gradient; return the list of the deferred computations."""
    later: list[Callable[[], None]] = []

    def forward(module: nn.Linear, x: Tensor) -> Tensor:
        return WeightLater.apply(x, module.weight, module, later)

    for module in stage.modules():
        if isinstance(module, nn.Linear):
            setattr(module, "forward", partial(forward, module))  # noqa: B010 - of the instance, not of its class
    return later


def run(
    plan: Schedule,
    stages: Mapping[int, nn.Module],
    micro_batches: list[Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...],
    spans: list[Span] | None = None,
    ranks: list[int] | None = None,
) -> float | None:
    """Run this rank's part of one step: adds the mean loss's gradients to `.grad`; returns that loss on the last rank.

    `stages`: this rank's modules by stage number. `micro_batches`: m tensors of ids, (B, T), which all ranks have: the
    first stage reads them, the last needs them for `loss(output, ids)`. `shape`: of the tensors between stages.
    `spans`: gets the start and end of each op, in seconds of the machine's clock, without the time it waits for input.
    `ranks`: global ranks of this pipeline, first stage first; None: all ranks.
    """
    ranks = ranks or list(range(len(plan)))
    ops = plan[ranks.index(dist.get_rank())]
    last = max(op.stage for rank_ops in plan for op in rank_ops)
    puts_off = any(op.kind == "W" for op in ops)
    later = {number: put_weights_off(stage) for number, stage in stages.items()} if puts_off else {}
    passed: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # input and output, by stage and micro-batch
    put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}
    under_way: list[tuple[dist.Work, Tensor]] = []  # a tensor must live until it is sent
    losses = []
    for op in ops:
        kind, number, micro_batch = op
        start = time.perf_counter()
        if kind == "F":
            x = None if number == 0 else _receive(shape, number - 1, op, ranks, last + 1).requires_grad_()
            start = time.perf_counter()
            out = stages[number](micro_batches[micro_batch] if x is None else x)
            if number == last:
                out = loss(out, micro_batches[micro_batch]) / len(micro_batches)
                losses.append(out.item())
            else:
                under_way.append(_send(out.detach(), op._replace(stage=number + 1), ranks, last + 1))
            passed[number, micro_batch] = x, out
        elif kind == "B":
            x, out = passed.pop((number, micro_batch))
            grad = None if number == last else _receive(shape, number + 1, op, ranks, last + 1)
            start = time.perf_counter()
            out.backward(grad)
            if x is not None:
                assert x.grad is not None  # `out` depends on it
                under_way.append(_send(x.grad, op._replace(stage=number - 1), ranks, last + 1))
            if puts_off:
                put_off[number, micro_batch] = later[number].copy()
                later[number].clear()
        else:
            for weight_gradient in put_off.pop((number, micro_batch)):
                weight_gradient()
        if spans is not None:
            spans.append(Span(op, dist.get_rank(), start, time.perf_counter()))
    for work, _ in under_way:
        work.wait()
    return sum(losses) if losses else None


def _tag(receiver: Op, stages: int) -> int:
    """Return a number that only this message has: two ranks may be neighbours in several pairs of stages."""
    return 2 * (receiver.micro_batch * stages + receiver.stage) + (receiver.kind == "B")


def _send(x: Tensor, receiver: Op, ranks: list[int], stages: int) -> tuple[dist.Work, Tensor]:
    x = x.contiguous()
    work = dist.isend(x, ranks[receiver.stage % len(ranks)], tag=_tag(receiver, stages))
    assert work is not None  # it is None only on ranks outside the group
    return work, x


def _receive(shape: tuple[int, ...], sender: int, receiver: Op, ranks: list[int], stages: int) -> Tensor:
    x = torch.empty(shape)
    dist.recv(x, ranks[sender % len(ranks)], tag=_tag(receiver, stages))
    return x
