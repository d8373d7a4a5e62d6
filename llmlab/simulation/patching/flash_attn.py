"""The package flash-attn on fake tensors: for transformers' attn_implementation="flash_attention_2", and its loss.

The package is compiled for a GPU, so transformers calls replacements here. Its kernels are those of torch's own
FlashAttention (Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp, mha_fwd and mha_bwd: output, log-sum-exp and
random state; then the gradients, the softmax's row sums and dQ in fp32), whose operators we simulate already.

    B  batch    T  query positions    H  heads    S  key positions    D  head size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.compat import check, has
from ...hardware.gpu import FLASH_ATTENTION_2_CAPABILITY
from ...step import fused_loss
from ..capability import Capability
from ..values.known import known
from .sdpa import HALF

aten = torch.ops.aten


class _FlashAttention(torch.autograd.Function):
    """flash_attn_interface.py, FlashAttnFunc, for q (B, T, H, D), k and v (B, S, Hkv, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, causal: bool, deterministic: bool
    ) -> Tensor:
        heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        result = aten._scaled_dot_product_flash_attention(*heads_first, dropout, causal, False, scale=scale)
        out, logsumexp, random_state = result[0].transpose(1, 2), result[1], result[6]
        ctx.options = dropout, causal, scale, deterministic
        ctx.save_for_backward(q, k, v, out, logsumexp, random_state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        q, k, v, out, logsumexp, random_state = ctx.saved_tensors
        dropout, causal, scale, deterministic = ctx.options
        heads_first = [tensor.transpose(1, 2) for tensor in (_rows(grad), q, k, v, out)]
        with _deterministic(deterministic):
            gradients = aten._scaled_dot_product_flash_attention_backward(
                *heads_first, logsumexp, None, None, q.shape[1], k.shape[1], dropout, causal, random_state,
                random_state, scale=scale,
            )  # fmt: skip
        return (*(gradient.transpose(1, 2) for gradient in gradients), None, None, None, None)


@contextmanager
def _deterministic(mode: bool) -> Iterator[None]:
    """Set torch's deterministic mode to the package's own argument, because the package ignores the mode of torch."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _rows(tensor: Tensor) -> Tensor:
    """maybe_contiguous"""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _FlashVarlen(torch.autograd.Function):
    """flash_attn_interface.py, FlashAttnVarlenFunc, for sequences of several lengths without padding: q (T, H, D), k
    and v (S, Hkv, D), where T and S are sums over the sequences. `longest` has the queries and keys of a sequence."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int],
        dropout: float, scale: float, causal: bool, deterministic: bool,
    ) -> Tensor:  # fmt: skip
        result = aten._flash_attention_forward(q, k, v, *starts, *longest, dropout, causal, False, scale=scale)
        out, logsumexp, random_state = result[:3]
        ctx.options = longest, dropout, causal, scale, deterministic
        ctx.save_for_backward(q, k, v, out, logsumexp, *starts, random_state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        q, k, v, out, logsumexp, *starts, random_state = ctx.saved_tensors
        longest, dropout, causal, scale, deterministic = ctx.options
        with _deterministic(deterministic):
            gradients = aten._flash_attention_backward(
                _rows(grad), q, k, v, out, logsumexp, *starts, *longest, dropout, causal, random_state, random_state,
                scale=scale,
            )  # fmt: skip
        return (*gradients, None, None, None, None, None, None)


def _functions(capability: Capability) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return flash_attn_func and flash_attn_varlen_func on a GPU of this `capability`; a window or a softcap needs no
    memory."""

    def padded(*tensors: Tensor) -> list[Tensor]:
        q, D = tensors[0], tensors[0].shape[-1]
        if capability < FLASH_ATTENTION_2_CAPABILITY:
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
        if q.dtype not in HALF:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if D > 256:
            raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
        return [F.pad(tensor, (0, -D % 8)) if D % 8 else _rows(tensor) for tensor in tensors]

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        D = q.shape[-1]
        scale = D**-0.5 if softmax_scale is None else softmax_scale
        return _FlashAttention.apply(*padded(q, k, v), dropout_p, scale, causal, deterministic)[..., :D]

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        D, starts = q.shape[-1], (cu_seqlens_q, cu_seqlens_k)
        scale = D**-0.5 if softmax_scale is None else softmax_scale
        lengths = _length(cu_seqlens_q, q.shape[0]), _length(cu_seqlens_k, k.shape[0])
        return _FlashVarlen.apply(*padded(q, k, v), starts, lengths, dropout_p, scale, causal, deterministic)[..., :D]

    return flash_attn_func, flash_attn_varlen_func


def _length(starts: Tensor, total: int) -> int:
    """Return the length of equal sequences with as many scores: the root of the mean square of the lengths, or the mean
    length if the lengths are unknown. The kernels allocate the same for any lengths with this sum."""
    values = known(starts)
    if values is None:
        return max(1, round(total / (starts.numel() - 1)))
    return max(1, round(float(values.diff().double().square().mean().sqrt())))


class _CrossEntropy(torch.autograd.Function):
    """ops/triton/cross_entropy.py, CrossEntropyLoss, for logits (rows, V)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits.shape[0]
        losses, lse, _z_losses = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
        ctx.save_for_backward(logits, lse, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, *_ = ctx.saved_tensors
        return torch.empty_like(logits), None


def _mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """losses/cross_entropy.py, CrossEntropyLoss.forward"""
    total: Tensor = _CrossEntropy.apply(logits, labels).sum()
    return total / (labels != fused_loss.IGNORED).sum()


def fake_fused_loss() -> AbstractContextManager[Any]:
    """Replace the loss of kernels="fused-loss" by one with the same tensors, whether flash-attn is installed or not."""
    return mock.patch.object(fused_loss, "cross_entropy", lambda: _mean_cross_entropy)


@contextmanager
def fake_flash_attn(capability: Capability) -> Iterator[None]:
    """Let transformers find flash-attn, simulated for this `capability`, whether the package is installed or not."""
    if not has("transformers.modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX"):
        yield
        return
    check("transformers flash-attn")
    from transformers import modeling_flash_attention_utils as utils

    def functions(implementation: str | None, *rest: Any, **named: Any) -> tuple:
        if implementation != "flash_attention_2":
            return imports(implementation, *rest, **named)
        return *_functions(capability), None, utils._pad_input, utils._unpad_input

    imports = utils._lazy_imports
    # Functions loaded before the block must not be called inside it, nor those loaded inside it afterwards.
    loaded = [name for name in vars(utils) if name.endswith("_fn") or name == "_loaded_implementation"]
    with ExitStack() as stack:
        for name in loaded:
            stack.enter_context(mock.patch.object(utils, name, None))
        stack.enter_context(mock.patch.object(utils, "_lazy_imports", functions))
        attributes = {"general_availability_check": lambda *args, **kwargs: True}
        stack.enter_context(mock.patch.dict(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], attributes))
        yield
