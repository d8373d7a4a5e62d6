"""Pipeline parallelism from scratch: each rank has some layers, and micro-batches pass through them one after another.

    python -m llmlab.course.experiments pipeline --ranks 2 --steps 20 --schedule 1f1b --json

`run` executes a schedule of pipeline_schedules.py, one operation after the other, and waits for the input of each.

    B  sequences of a micro-batch    S  tokens per sequence    h  hidden size    V  vocabulary
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
    """Stage `number` of `stages` of a Llama: some of its blocks. The first stage also has the embedding, and the last
    one the final norm and the head."""

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
        """Return the output for the next stage, (B, S, h), or the logits of the last stage, (B, S, V).

        `x`: the ids, (B, S), in the first stage, and else the output of the stage before.
        """
        x_BSh = x if self.embed_tokens is None else self.embed_tokens(x)
        positions_BS = torch.arange(x.shape[1], device=x.device)[None]  # each stage computes the rotary angles
        turned = turn(self.rope, self.head_dim, positions_BS, x_BSh.dtype)
        for block in self.layers:
            x_BSh = block(x_BSh, turned, None, None)
        return x_BSh if self.norm is None or self.lm_head is None else self.lm_head(self.norm(x_BSh))


class WeightLater(torch.autograd.Function):
    """x · Wᵀ. Its backward pass returns the gradient of x, and appends a function that computes the gradient of W to
    `later`."""

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


def defer_weights(stage: nn.Module) -> list[Callable[[], None]]:
    """Make each nn.Linear of `stage` defer the gradient of its weight. Return the list to which the deferred
    computations are appended."""
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
    """Run the part of this rank in one step. Adds the gradients of the mean loss to `.grad`, and returns this loss on
    the last rank.

    `stages`: the modules of this rank, by the number of their stage. `micro_batches`: m tensors of ids, (B, S), on all
    ranks. The first stage reads them, and the last one needs them for `loss(output, ids)`. `shape`: of the tensors
    between stages. `spans`: receives the start and end of each operation, without the time that it waits for its input.
    `ranks`: the global ranks of this pipeline, in the order of the stages. By default, all ranks.
    """
    ranks = ranks or list(range(len(plan)))
    ops = plan[ranks.index(dist.get_rank())]
    last = max(op.stage for rank_ops in plan for op in rank_ops)
    defers = any(op.kind == "W" for op in ops)
    later = {number: defer_weights(stage) for number, stage in stages.items()} if defers else {}
    saved: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # input and output, by stage and micro-batch
    deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}
    sends: list[tuple[dist.Work, Tensor]] = []  # a tensor has to exist until it is sent
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
                sends.append(_send(out.detach(), op._replace(stage=number + 1), ranks, last + 1))
            saved[number, micro_batch] = x, out
        elif kind == "B":
            x, out = saved.pop((number, micro_batch))
            grad = None if number == last else _receive(shape, number + 1, op, ranks, last + 1)
            start = time.perf_counter()
            out.backward(grad)
            if x is not None:
                assert x.grad is not None  # `out` depends on it
                sends.append(_send(x.grad, op._replace(stage=number - 1), ranks, last + 1))
            if defers:
                deferred[number, micro_batch] = later[number].copy()
                later[number].clear()
        else:
            for weight_gradient in deferred.pop((number, micro_batch)):
                weight_gradient()
        if spans is not None:
            spans.append(Span(op, dist.get_rank(), start, time.perf_counter()))
    for work, _ in sends:
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
