"""Monkeypatch of scaled_dot_product_attention: the kernel that torch chooses for a GPU, and its call.

The rules are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, the calls those of transformers/
attention.cpp (torch 2.13). Each kernel saves the results of its operator for the backward pass.

    B  batch    H  heads    T  query positions    S  key positions    D  head size
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from ...hardware.gpu import prefers_cudnn_attention
from ..capability import Capability

HALF = (torch.float16, torch.bfloat16)


def backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    capability: Capability,
    enable_gqa: bool = False,
) -> str:
    """Return "cudnn", "flash", "efficient" or "math" for q (B, H, T, D), k and v (B, Hkv, S, D) on this compute
    `capability`, without those that sdpa_kernel or torch.backends.cuda switch off. RuntimeError if none remains."""
    switches = torch.backends.cuda
    if query.dim() == 4 and all(tensor.stride(-1) == 1 for tensor in (query, key, value)):
        H, Hk, Hv = (tensor.shape[1] for tensor in (query, key, value))
        # check_batch_size_and_num_heads_dense; only cuDNN allows different numbers of key heads and value heads.
        shared = H % Hk == 0 == H % Hv if enable_gqa else H == Hk == Hv
        if switches.cudnn_sdp_enabled() and shared and _cudnn(query, key, value, mask, dropout, capability):
            return "cudnn"
        shared = shared and Hk == Hv
        if switches.flash_sdp_enabled() and shared and _flash(query, key, value, mask, dropout, causal, capability):
            return "flash"
        if switches.mem_efficient_sdp_enabled() and _efficient(query, key, value, capability):
            return "efficient"
    if not switches.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return "math"


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, capability: Capability
) -> bool:
    """The workspace is not counted, because cuDNN picks an algorithm at run time and only then reports its workspace.

    TORCH_CUDNN_SDPA_DEPRIORITIZED=1 prefers flash attention, as torch did from 2.5.1 (pull request 138522) until its
    wheels contained a cuDNN newer than 9.15.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    trains_mask = mask is not None and mask.requires_grad  # autograd has no gradient for cuDNN's bias
    preferred = prefers_cudnn_attention(capability, query.shape[-1], value.shape[-1], dropout)
    return query.dtype in HALF and preferred and key.shape[2] != 1 and not trains_mask


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, capability: Capability
) -> bool:
    D = query.shape[-1]
    if (
        capability < (8, 0)
        or query.dtype not in HALF
        or mask is not None
        or D > 256
        or not D == key.shape[-1] == value.shape[-1]
    ):
        return False
    if causal and query.shape[2] != key.shape[2]:
        return False
    consumer = capability in ((8, 6), (8, 9)) or capability[0] == 12
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return not (consumer and trains and D > 192 and (D <= 224 or dropout > 0))


def _efficient(query: Tensor, key: Tensor, value: Tensor, capability: Capability) -> bool:
    if query.dtype not in (*HALF, torch.float32) or (query.dtype == torch.bfloat16 and capability < (8, 0)):
        return False
    if not query.shape[1] == key.shape[1] == value.shape[1]:  # with enable_gqa too, up to torch 2.13
        return False
    half = query.dtype in HALF
    uses_tensor_cores = capability[0] >= 8 or (capability[0] >= 7 and half)
    alignment = max(4 if capability[0] >= 8 else 1, (8 if half else 4) if uses_tensor_cores else 1)
    return query.shape[-1] % alignment == 0 and value.shape[-1] % alignment == 0


def attention(
    capability: Capability,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention as on a CUDA GPU of this compute `capability`."""
    aten = torch.ops.aten
    chosen = backend(query, key, value, attn_mask, dropout_p, is_causal, capability, enable_gqa)
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive(attn_mask, query.dtype)
    if chosen == "math":
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if chosen == "flash":
        D = query.shape[-1]
        scale = D**-0.5 if scale is None else scale
        if D % 8:  # pad_last_dim<8>
            query, key, value = (F.pad(tensor, (0, 8 - D % 8)) for tensor in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :D]
    if chosen == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, trains, dropout_p, is_causal, False, scale=scale
        )[0]
    if attn_mask is not None:
        attn_mask = _aligned_mask(attn_mask, query, key)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale
    )[0]


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """_scaled_dot_product_attention_math, operator by operator: half precision becomes fp32, and all (B, H, T, S)
    scores are stored. On fake tensors, torch's function would add the mask out of place (areAnyTensorSubclassLike)."""
    dtype, factor = query.dtype, abs(query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    if not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = (tensor.float() if tensor.dtype in HALF else tensor for tensor in (query, key, value))
    scaled = query * (-factor if scale is not None and scale < 0 else factor)
    if causal:
        if mask is not None:
            raise RuntimeError(
                "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
            )
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(mask, scaled.dtype)
    keys, values = _repeated(query, key, value) if enable_gqa else (key, value)
    weights = scaled @ (keys.transpose(-2, -1) * factor)
    if mask is not None:
        weights.add_(mask)
    weights = torch.ops.aten._safe_softmax(weights, -1)
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    unused = weights.to(dtype)  # the second result of the operator, which exists while the first is computed
    out = (weights @ values).to(dtype)
    del unused
    return out


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """pre_process_group_query_attention_input: repeat keys and values for all query heads."""
    H, Hk, Hv = (tensor.shape[-3] for tensor in (query, key, value))
    if H % Hk or H % Hv:
        raise RuntimeError("Number of heads in key and value must divide the number of heads in ")  # sic
    if H == Hk == Hv:
        return key, value
    return key.repeat_interleave(H // Hk, -3), value.repeat_interleave(H // Hv, -3)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """convert_boolean_attn_mask: 0 at visible positions, -inf elsewhere."""
    return torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=dtype, device=mask.device))


def _aligned_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """preprocess_mask: pad the rows unless each begins at a multiple of 8 elements, then expand the mask as a view."""
    S = mask.shape[-1]
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        mask = F.pad(mask, (0, 8 - S % 8))[..., :S]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
