"""flex_attention without torch.compile, on a simulated GPU: torch's own unfused form, which stores all scores.

torch compiles that form with its backend "eager", but here it runs uncompiled. In compiled code Inductor generates one
kernel for the forward pass and one for the backward pass (../compiled).

    B  batch    H  heads    T  query positions    S  key positions    D  head size
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...base.compat import DispatchKey, symbol
from ...base.errors import NotAvailable
from ...base.notes import Note
from ..engine.engine import Engine
from ..values.placeholders import located
from .patches import on_gpu

DENSE = DispatchKey.CompositeExplicitAutograd
MODULE = "torch.nn.attention.flex_attention"
CALLER = "_flex_attention_hop_wrapper"  # calls the operator where flex_attention is not compiled
WRITTEN_OUT = Note(
    "flex-attention-eager",
    "flex_attention ran without torch.compile, so it stores the whole matrix of scores, several times.",
)


@contextmanager
def flex_attention_unfused(engine: Engine) -> Iterator[None]:
    """Let uncompiled flex_attention allocate the same GPU memory as on CUDA until the block ends."""
    operator = symbol(MODULE + ".flex_attention_hop")
    real = type(operator).__call__

    def call(self: Any, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: Any, *options: Any) -> Any:
        if sys._getframe(1).f_code.co_name != CALLER or not on_gpu(query):
            return real(self, query, key, value, score_mod, mask, *options)
        _check(score_mod, mask[-1])
        engine.remark(WRITTEN_OUT)
        return _Unfused.apply(self, score_mod, mask, options, query, key, value)

    with (
        mock.patch.object(symbol(MODULE), "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        mock.patch.object(type(operator), "__call__", call),
    ):
        yield


def _check(*mods: Callable) -> None:
    """Raise NotAvailable for a function whose closure contains a tensor that requires a gradient."""
    for mod in mods:
        captured = [cell.cell_contents for cell in getattr(mod, "__closure__", None) or ()]
        if torch.is_grad_enabled() and any(isinstance(item, Tensor) and item.requires_grad for item in captured):
            raise located(NotAvailable(
                "flex_attention: the memory for the gradient of a tensor that its score_mod takes from outside "
                "is not simulated; detach() it, or lab.measure it"
            ))  # fmt: skip


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
        ctx.options = score_mod, mask, options
        return out, lse, largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        score_mod, mask, (scale, kernel_options, *_) = ctx.options
        saved = [tensor.detach() for tensor in ctx.saved_tensors]
        backward = torch.ops.higher_order.flex_attention_backward.py_kernels[DENSE]
        with torch.enable_grad():  # it differentiates score_mod
            *grads, _ = backward(*saved, grad, grad_lse, score_mod, None, mask, scale, kernel_options, (), ())
        return None, None, None, None, *grads
