"""flex_attention on a simulated card: what its compiled kernels ask the allocator for, or torch's own without compile.

Where a script asks for torch.compile, attention is one Triton kernel forward and one backward, which write no scores
(torch/_inductor/kernel/flex/flex_attention.py). Where it never does, torch itself runs the unfused form and says so.

    B  batch    H  heads    T  query positions    S  key positions    D  head size
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...base.compat import AutoDispatchBelowAutograd, DispatchKey, symbol
from ...base.errors import NotAvailable
from ..engine.engine import Engine
from ..values.placeholders import located
from .patches import on_card

DENSE = DispatchKey.CompositeExplicitAutograd
FLEX = "torch.nn.attention.flex_attention.flex_attention_hop"


def flex_attention_as_compiled(engine: Engine) -> AbstractContextManager:
    """Let flex_attention take of the card what it does on CUDA until the block ends."""
    real = symbol(FLEX)

    def attend(query: Tensor, key: Tensor, value: Tensor, score_mod: Callable, mask: tuple, *options: Any) -> Any:
        if not on_card(query):
            return real(query, key, value, score_mod, mask, *options)
        _check(score_mod, mask[-1])
        if not engine.compiles:
            return _Unfused.apply(real, score_mod, mask, options, query, key, value)
        engine.launches["flex_attention"] += 1
        return _Fused.apply(real, score_mod, mask, options, query, key, value)

    engine.kernels[real] = _forward
    return mock.patch.object(symbol(FLEX.rpartition(".")[0]), "flex_attention_hop", attend)


def _check(*mods: Callable) -> None:
    """Raise NotAvailable for a function with a tensor in it that is to get a gradient."""
    for mod in mods:
        held = [cell.cell_contents for cell in getattr(mod, "__closure__", None) or ()]
        if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in held):
            raise located(NotAvailable(
                "flex_attention: a tensor that its score_mod takes from outside gets a gradient, of which the memory "
                "is not simulated; detach() it, or lab.measure it"
            ))  # fmt: skip


def _forward(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel: its statistics, (B, H, T) fp32 each, then its output (B, H, T, D) laid out as the queries are."""
    lse, largest = (query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2))
    return _laid_out_as(query, value.shape[-1]), lse, largest


def _laid_out_as(tensor: Tensor, size: int) -> Tensor:
    """infer_dense_strides: an empty tensor whose dimensions follow each other as those of `tensor`, the last inside."""
    shape = *tensor.shape[:3], size
    order = sorted(range(3), key=tensor.stride, reverse=True)
    return tensor.new_empty([shape[each] for each in (*order, 3)]).permute(*map(order.index, range(3)), 3)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Any, score_mod: Any, mask: tuple, options: tuple, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        with AutoDispatchBelowAutograd():
            out, lse, largest = kernel(query, key, value, score_mod, mask, *options)
        ctx.mark_non_differentiable(largest)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mask = mask
        return out, lse, largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        query, key, value, *_outputs = ctx.saved_tensors
        # The sum over D of out x its gradient, one kernel; with a gradient of the lse, that in base 2 comes first.
        wide = [query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(1 if grad_lse is None else 2)]
        grads = {name: _laid_out_as(each, each.shape[-1]) for name, each in (("q", query), ("v", value))}
        grads["k"] = _laid_out_as(key, key.shape[-1])
        del wide
        return None, None, None, None, grads["q"], grads["k"], grads["v"]


class _Unfused(torch.autograd.Function):
    """sdpa_dense and its backward: all scores, (B, H, T, S) in fp32, written out several times."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Any, score_mod: Any, mask: tuple, options: tuple, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, lse, largest = kernel.py_kernels[DENSE](query, key, value, score_mod, mask, *options)
        ctx.mark_non_differentiable(largest)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.given = score_mod, mask, options
        return out, lse, largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        score_mod, mask, (scale, kernel_options, *_) = ctx.given
        saved = [each.detach() for each in ctx.saved_tensors]
        backward = torch.ops.higher_order.flex_attention_backward.py_kernels[DENSE]
        with torch.enable_grad():  # it looks for the gradient of score_mod
            *grads, _ = backward(*saved, grad, grad_lse, score_mod, None, mask, scale, kernel_options, (), ())
        return None, None, None, None, *grads
