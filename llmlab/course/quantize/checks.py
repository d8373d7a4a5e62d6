"""Input checks of the formats and algorithms; each error says what was given and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...base.errors import SpecError, check_counts


def as_floats(array: Any, what: str = "array") -> torch.Tensor:
    """Return `array` (numpy, or a torch tensor) as a contiguous float32 tensor on the CPU; the input is not changed.

    Raises SpecError for a dtype that is not a float, an empty array, infinities and NaNs.
    """
    tensor = _float_tensor(array, what)
    if not tensor.numel() or not tensor.ndim:
        raise SpecError(f"{what} of shape {tuple(tensor.shape)} holds no row of weights; give at least one")
    return _finite(tensor.cpu().float(), what).contiguous()  # a float64 beyond float32 is inf by now


def as_matrix(tensor: Any, what: str = "weight") -> torch.Tensor:
    """Return `tensor` as a detached matrix of float32 (float64 stays float64); the input is not changed.

    Raises SpecError unless it has two dimensions and a float dtype, for an empty one, for infinities and NaNs.
    """
    tensor = _float_tensor(tensor, what)
    if tensor.ndim != 2 or not tensor.numel():
        raise SpecError(
            f"{what} of shape {tuple(tensor.shape)} is not a matrix; give (rows, columns), neither of them 0"
        )
    return _finite(tensor if tensor.dtype == torch.float64 else tensor.float(), what)


def _float_tensor(array: Any, what: str) -> torch.Tensor:
    # np.array copies: torch takes no array with negative strides, and warns of one that cannot be written to.
    tensor = array.detach() if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))
    if not tensor.is_floating_point():
        raise SpecError(f"{what} of {tensor.dtype} does not hold floats; give float32, float16 or bfloat16")
    return tensor


def _finite(tensor: torch.Tensor, what: str) -> torch.Tensor:
    finite = tensor.isfinite()
    if not finite.all():
        first = tuple((~finite).nonzero()[0].tolist())
        raise SpecError(
            f"{what} holds {int(tensor.isnan().sum())} nan and {int(tensor.isinf().sum())} inf, the first at {first}; "
            "find out where they came from first"
        )
    return tensor


def layer(weight: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a linear layer's weight (out, in) and its calibration inputs (tokens, in); SpecError if `in` differs.

    `inputs` may have several leading dimensions, as in (batch, seq_len, in); all count as tokens.
    """
    weight = as_matrix(weight)
    inputs = torch.as_tensor(inputs)
    inputs = as_matrix(inputs.reshape(-1, inputs.shape[-1]) if inputs.ndim > 2 else inputs, "inputs").to(weight)
    if inputs.shape[1] != weight.shape[1]:
        raise SpecError(
            f"inputs of {inputs.shape[1]} features for a weight of shape {tuple(weight.shape)}; "
            f"give (tokens, {weight.shape[1]})"
        )
    return weight, inputs


def check_bits(bits: int) -> int:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise SpecError(f"bits={bits!r} is not a whole number from 2 to 8")
    return bits


def check_group(group: int | None, size: int) -> int:
    """Return how many of `size` columns share a scale: `group`, or all of them if it is None or -1."""
    if group is None or group == -1:
        return size
    check_counts(group=group)
    if size % group:
        raise SpecError(f"group={group} does not divide {size} columns; give a divisor, or None for one scale per row")
    return group
