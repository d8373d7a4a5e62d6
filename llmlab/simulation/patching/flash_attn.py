"""The package flash-attn on fake tensors: for transformers' attn_implementation="flash_attention_2", and its loss.

The package is compiled for a GPU, so transformers calls replacements here. Its kernels are those of torch's own
FlashAttention (Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp, mha_fwd and mha_bwd: output, log-sum-exp and
random state; then the gradients, the softmax's row sums and dQ in fp32), whose operators we simulate already.

    B  batch    T  query positions    H  heads    S  key positions    D  head size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from ...base.compat import check, has
from ...base.errors import NotAvailable
from ...hardware.gpu import FLASH_ATTENTION_2_CAPABILITY
from ...step import fused_loss
from ..capability import Capability
from ..values.known import known
from .sdpa import HALF

aten = torch.ops.aten


class _FlashAttention(torch.autograd.Function):
    """flash_attn_interface.py, FlashAttnFunc, for q (B, T, H, D), k and v (B, S, Hkv, D). FlashAttnKVPackedFunc has k
    and v in one tensor (B, S, 2, Hkv, D), and FlashAttnQKVPackedFunc all three."""

    @staticmethod
    def forward(
        ctx: Any, dropout: float, scale: float, causal: bool, deterministic: bool, *given: Tensor
    ) -> Tensor:
        q, k, v = _separate(given)
        heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        result = aten._scaled_dot_product_flash_attention(*heads_first, dropout, causal, False, scale=scale)
        out, logsumexp, random_state = result[0].transpose(1, 2), result[1], result[6]
        ctx.options = len(given), dropout, causal, scale, deterministic
        ctx.save_for_backward(q, k, v, out, logsumexp, random_state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        q, k, v, out, logsumexp, random_state = ctx.saved_tensors
        given, dropout, causal, scale, deterministic = ctx.options
        heads_first = [tensor.transpose(1, 2) for tensor in (_rows(grad), q, k, v, out)]
        with _deterministic(deterministic):
            gradients = aten._scaled_dot_product_flash_attention_backward(
                *heads_first, logsumexp, None, None, q.shape[1], k.shape[1], dropout, causal, random_state,
                random_state, scale=scale,
            )  # fmt: skip
        gradients = [gradient.transpose(1, 2) for gradient in gradients]
        return (None, None, None, None, *_as_given(gradients, given))


def _separate(given: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return q, k and v. The last of fewer than three tensors has several in its third dimension from the end."""
    return given if len(given) == 3 else (*given[:-1], *given[-1].unbind(-3))


def _as_given(gradients: list[Tensor], given: int) -> list[Tensor]:
    """Return the gradients of `given` tensors. The kernels write those of one packed tensor into one allocation of the
    same total size, which replaces the separate ones here."""
    last = given - 1
    if given < 3:
        *rows, heads, size = gradients[last].shape
        dtype, device = gradients[last].dtype, gradients[last].device
        del gradients[last:]
        gradients.append(torch.empty((*rows, 3 - last, heads, size), dtype=dtype, device=device))
    return gradients


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
        ctx: Any, starts: tuple[Tensor, Tensor], longest: tuple[int, int], dropout: float, scale: float, causal: bool,
        deterministic: bool, *given: Tensor,
    ) -> Tensor:  # fmt: skip
        q, k, v = _separate(given)
        result = aten._flash_attention_forward(q, k, v, *starts, *longest, dropout, causal, False, scale=scale)
        out, logsumexp, random_state = result[:3]
        ctx.options = len(given), longest, dropout, causal, scale, deterministic
        ctx.save_for_backward(q, k, v, out, logsumexp, *starts, random_state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        q, k, v, out, logsumexp, *starts, random_state = ctx.saved_tensors
        given, longest, dropout, causal, scale, deterministic = ctx.options
        with _deterministic(deterministic):
            gradients = aten._flash_attention_backward(
                _rows(grad), q, k, v, out, logsumexp, *starts, *longest, dropout, causal, random_state, random_state,
                scale=scale,
            )  # fmt: skip
        return (None, None, None, None, None, None, *_as_given(list(gradients), given))


def functions(capability: Capability) -> dict[str, Callable[..., Tensor]]:
    """Return the functions of flash_attn/flash_attn_interface.py on a GPU of this `capability`; a window, a softcap or
    ALiBi needs no memory."""

    def padded(*tensors: Tensor) -> list[Tensor]:
        q, D = tensors[0], tensors[0].shape[-1]
        if capability < FLASH_ATTENTION_2_CAPABILITY:
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
        if q.dtype not in HALF:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if D > 256:
            raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
        return [F.pad(tensor, (0, -D % 8)) if D % 8 else _rows(tensor) for tensor in tensors]

    def attend(
        given: Sequence[Tensor], starts: tuple[Tensor, Tensor] | None, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:  # fmt: skip
        if return_attn_probs:
            raise NotAvailable("flash_attn's return_attn_probs=True is not simulated; leave it out")
        D = given[0].shape[-1]
        options = dropout_p, D**-0.5 if softmax_scale is None else softmax_scale, causal, deterministic
        if starts is None:
            return _FlashAttention.apply(*options, *padded(*given))[..., :D]
        q, k, _ = _separate(given)
        lengths = _length(starts[0], q.shape[0]), _length(starts[1], k.shape[0])
        return _FlashVarlen.apply(starts, lengths, *options, *padded(*given))[..., :D]

    # transformers looks for the names of these arguments.
    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    ) -> Tensor:  # fmt: skip
        return attend((q, k, v), None, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                      deterministic, return_attn_probs)  # fmt: skip

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False,
    ) -> Tensor:  # fmt: skip
        return attend((q, k, v), (cu_seqlens_q, cu_seqlens_k), dropout_p, softmax_scale, causal, window_size, softcap,
                      alibi_slopes, deterministic, return_attn_probs)  # fmt: skip

    def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **named: Any) -> Tensor:
        return attend((qkv,), None, *args, **named)

    def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **named: Any) -> Tensor:
        return attend((q, kv), None, *args, **named)

    def flash_attn_varlen_qkvpacked_func(
        qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **named: Any
    ) -> Tensor:
        return attend((qkv,), (cu_seqlens, cu_seqlens), *args, **named)

    def flash_attn_varlen_kvpacked_func(
        q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        *args: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        return attend((q, kv), (cu_seqlens_q, cu_seqlens_k), *args, **named)

    made = (flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func,
            flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func)  # fmt: skip
    return {function.__name__: function for function in made}


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
    def forward(ctx: Any, logits: Tensor, labels: Tensor, in_place: bool) -> Tensor:
        rows = logits.shape[0]
        losses, lse, _z_losses = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
        ctx.save_for_backward(logits, lse, labels)
        ctx.in_place = in_place
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, *_ = ctx.saved_tensors
        return logits if ctx.in_place else torch.empty_like(logits), None, None


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, *_scales: Any, inplace_backward: bool = False, **_named: Any
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and the part of it that comes from log-sum-exp's square."""
    losses: Tensor = _CrossEntropy.apply(logits, labels, inplace_backward)
    return losses, torch.empty_like(losses)


def _mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """losses/cross_entropy.py, CrossEntropyLoss.forward"""
    total: Tensor = _CrossEntropy.apply(logits, labels, False).sum()
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

    def lazy_imports(implementation: str | None, *rest: Any, **named: Any) -> tuple:
        if implementation != "flash_attention_2":
            return imports(implementation, *rest, **named)
        ours = functions(capability)
        return ours["flash_attn_func"], ours["flash_attn_varlen_func"], None, utils._pad_input, utils._unpad_input

    imports = utils._lazy_imports
    # Functions loaded before the block must not be called inside it, nor those loaded inside it afterwards.
    loaded = [name for name in vars(utils) if name.endswith("_fn") or name == "_loaded_implementation"]
    with ExitStack() as stack:
        for name in loaded:
            stack.enter_context(mock.patch.object(utils, name, None))
        stack.enter_context(mock.patch.object(utils, "_lazy_imports", lazy_imports))
        attributes = {"general_availability_check": lambda *args, **kwargs: True}
        stack.enter_context(mock.patch.dict(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], attributes))
        yield
