"""Stand-ins for scripts that import the package flash-attn, which is compiled for a GPU, where it is not installed.

They allocate what version 2.8.4 of Dao-AILab/flash-attention allocates. Modules that are not listed in `_modules` are
not found. A library that asks whether the package is installed gets the answer no.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import NotAvailable
from ...base.files import is_library
from .. import FOLDER
from ..capability import Capability
from ..values.placeholders import warn_at_users_line
from .flash_attn import cross_entropy_loss, functions

NAME, VERSION = "flash_attn", "2.8.4"


class _Rotary(torch.autograd.Function):
    """layers/rotary.py, ApplyRotaryEmb, ApplyRotaryEmbQKV_ and ApplyRotaryEmbKV_."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.in_place = in_place
        return x if in_place else _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return (grad if ctx.in_place else _rotated(grad, *ctx.saved_tensors)), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _contiguous = cos.contiguous(), sin.contiguous()
    return x.clone()


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, *_: Any, **_named: Any
) -> Tensor:
    """Return x (B, T, H, D), rotated."""
    return _Rotary.apply(x, cos, sin, inplace)


def apply_rotary_in_place(x: Tensor, cos: Tensor, sin: Tensor, *_: Any, **_named: Any) -> Tensor:
    """Return x itself, in which queries and keys, or keys alone, are rotated."""
    return _Rotary.apply(x, cos, sin, True)


class _Norm(torch.autograd.Function):
    """ops/triton/layer_norm.py, LayerNormFn, of x plus an optional residual, both (..., N)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, prenorm: bool,
        residual_dtype: torch.dtype, rms: bool,
    ) -> Any:  # fmt: skip
        rows = x.reshape(-1, x.shape[-1])
        y = rows.clone()
        summed = rows if residual is None and residual_dtype == x.dtype else rows.to(residual_dtype, copy=True)
        statistics = [torch.empty(len(rows), device=x.device) for _ in range(1 if rms else 2)]
        ctx.save_for_backward(summed, weight, bias, *statistics)
        ctx.options = x.dtype, x.shape, residual is not None
        return (y.view(x.shape), summed.view(x.shape)) if prenorm else y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_grad_residual: Tensor) -> tuple:
        summed, weight, bias, *_statistics = ctx.saved_tensors
        dtype, shape, residual = ctx.options
        grad_x = summed.to(dtype, copy=True)
        grad_residual = None if not residual else grad_x if dtype == summed.dtype else summed.clone()
        parts = 8 * torch.cuda.get_device_properties(0).multi_processor_count
        partial_sums = [each if each is None else torch.empty(parts, each.numel(), device=each.device)
                        for each in (weight, bias)]  # fmt: skip
        grad_weight, grad_bias = (each if each is None else each.sum(0).to(weight.dtype) for each in partial_sums)
        grad_residual = None if grad_residual is None else grad_residual.view(shape)
        return grad_x.view(shape), grad_weight, grad_bias, grad_residual, None, None, None


def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, *_: Any, prenorm: bool = False,
    residual_in_fp32: bool = False, is_rms_norm: bool = False, dropout_p: float = 0.0, **named: Any,
) -> Any:  # fmt: skip
    """Return the norm of x plus the residual; with `prenorm`, this sum too."""
    if dropout_p or any(named.get(name) is not None for name in ("x1", "weight1", "rowscale")):
        raise NotAvailable("flash_attn's layer_norm_fn is not simulated with dropout, x1 or rowscale; use PyTorch's "
                           "layer_norm in the script")  # fmt: skip
    dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    return _Norm.apply(x, weight, bias, residual, prenorm, dtype, is_rms_norm)


def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **named: Any) -> Any:
    """Return the RMS norm of x plus the residual."""
    return layer_norm_fn(x, weight, bias, *args, **named, is_rms_norm=True)


class RMSNorm(nn.Module):
    """ops/triton/layer_norm.py, RMSNorm"""

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, **named: Any) -> Any:
        return rms_norm_fn(x, self.weight, None, eps=self.eps, **named)


class CrossEntropyLoss(nn.Module):
    """losses/cross_entropy.py, CrossEntropyLoss"""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", inplace_backward: bool = False,
        return_z_loss: bool = False, **_named: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction
        self.inplace_backward, self.return_z_loss = inplace_backward, return_z_loss

    def forward(self, logits: Tensor, labels: Tensor) -> Any:
        losses = cross_entropy_loss(logits, labels, inplace_backward=self.inplace_backward)
        if self.reduction != "none":
            count = (labels != self.ignore_index).sum() if self.reduction == "mean" else 1
            losses = losses[0].sum() / count, losses[1].sum() / count
        return losses if self.return_z_loss else losses[0]


# ---- bert_padding.py


def index_first_axis(values: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of `values` at `indices`."""
    flat = values.flatten(1)
    rows = torch.gather(flat, 0, indices[:, None].expand(-1, flat.shape[1]))
    return rows.view(-1, *values.shape[1:])


def unpad_input(hidden: Tensor, mask: Tensor, unused_mask: Tensor | None = None) -> tuple:
    """Return the tokens of `mask` without padding, their indices, where sequences start, the longest, and lengths."""
    used = mask if unused_mask is None else mask + unused_mask
    lengths = used.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(used.flatten(), as_tuple=False).flatten()
    starts = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden.flatten(0, 1), indices)
    return rows, indices, starts, lengths.max().item(), mask.sum(dim=-1, dtype=torch.int32)


def index_put_first_axis(values: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Return `rows` rows: those of `values` at `indices`, and zeros."""
    return values.new_zeros(rows, *values.shape[1:]).index_put((indices,), values)


def pad_input(hidden: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return tokens without padding as (batch, seqlen, ...)."""
    return index_put_first_axis(hidden, indices, batch * seqlen).view(batch, seqlen, *hidden.shape[1:])


# ---- imports


def _modules(capability: Capability) -> dict[str, dict[str, Any]]:
    attention = functions(capability)

    def named(*made: Callable) -> dict[str, Any]:
        return {each.__name__: each for each in made}

    in_place = dict.fromkeys(("apply_rotary_emb_qkv_", "apply_rotary_emb_kv_"), apply_rotary_in_place)
    modules: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION, **attention},
        ".flash_attn_interface": attention,
        ".bert_padding": named(index_first_axis, index_put_first_axis, pad_input, unpad_input),
        ".layers": {}, ".losses": {}, ".ops": {}, ".ops.triton": {},
        ".layers.rotary": {**named(apply_rotary_emb), "apply_rotary_emb_func": apply_rotary_emb, **in_place},
        ".losses.cross_entropy": named(CrossEntropyLoss),
        ".ops.triton.cross_entropy": named(cross_entropy_loss),
        ".ops.triton.layer_norm": named(layer_norm_fn, rms_norm_fn, RMSNorm),
    }  # fmt: skip
    return {NAME + name: contents for name, contents in modules.items()}


class _Package(MetaPathFinder, Loader):
    def __init__(self, modules: dict[str, dict[str, Any]]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in self.modules and not _a_library_asks() else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == NAME:
            warn_at_users_line(
                f"{NAME} is not installed, and is simulated as version {VERSION}. If it is not installed on your GPU's "
                "machine either, the script takes another path there, or fails."
            )
        vars(module).update(self.modules[module.__name__])


def _a_library_asks() -> bool:
    """Return whether a library calls importlib.util.find_spec, so that nothing is imported yet."""
    frame = sys._getframe(2)
    while frame.f_code is not find_spec.__code__:
        if not frame.f_code.co_filename.startswith(("<frozen importlib", FOLDER)) or frame.f_back is None:
            return False
        frame = frame.f_back
    return frame.f_back is not None and is_library(frame.f_back.f_code.co_filename)


@contextmanager
def importable_flash_attn(capability: Capability) -> Iterator[None]:
    """Let scripts import flash_attn, simulated for this `capability`, if the package is not installed."""
    if find_spec(NAME) is not None:
        yield
        return
    finder = _Package(_modules(capability))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.modules:
            sys.modules.pop(name, None)
