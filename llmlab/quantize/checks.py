"""Input checks of the formats and algorithms; each error says what was given and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base.errors import SpecError, check_counts

if TYPE_CHECKING:
    import numpy as np
    import torch


def as_array(array: Any, what: str = "array") -> np.ndarray:
    """Return `array` (numpy, or a torch tensor) as a contiguous float32 array; the input is not changed.

    Raises SpecError for a dtype that is not a float, an empty array, infinities and NaNs.
    """
    import numpy as np

    if hasattr(array, "detach"):  # a torch tensor; numpy has no bfloat16, so torch casts
        floats = array.is_floating_point()
        given, array = array.dtype, (array.detach().cpu().float().numpy() if floats else array)
    else:
        array = np.asarray(array)
        given, floats = array.dtype, array.dtype.kind == "f"
    if not floats:
        raise SpecError(f"{what} of {given} is not an array of floats; give float16, bfloat16 or float32")
    if 0 in array.shape or not array.shape:
        raise SpecError(f"{what} of shape {tuple(array.shape)} holds no row of weights; give at least one")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, and the next check raises
        array = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(array).all():
        raise SpecError(f"{what} holds {_bad(array)}; their blocks have no scale: find out where they came from first")
    return array


def _bad(array: np.ndarray) -> str:
    import numpy as np

    nans, first = int(np.isnan(array).sum()), np.argwhere(~np.isfinite(array))[0]
    infinities = int(np.isinf(array).sum())
    return f"{nans} nan and {infinities} inf, the first at {tuple(int(i) for i in first)}"


def as_matrix(tensor: Any, what: str = "weight") -> torch.Tensor:
    """Return `tensor` as a detached matrix of float32 (float64 stays float64); the input is not changed.

    Raises SpecError unless it has two dimensions and a float dtype, for an empty one, for infinities and NaNs.
    """
    import torch

    tensor = torch.as_tensor(tensor).detach()
    if not tensor.is_floating_point():
        raise SpecError(f"{what} of {tensor.dtype} is not a matrix of floats; give float32, float16 or bfloat16")
    if tensor.ndim != 2 or not tensor.numel():
        raise SpecError(
            f"{what} of shape {tuple(tensor.shape)} is not a matrix; give (rows, columns), neither of them 0"
        )
    matrix = tensor if tensor.dtype == torch.float64 else tensor.float()
    if not torch.isfinite(matrix).all():
        raise SpecError(f"{what} holds {_bad(matrix.cpu().numpy())}; find out where they came from first")
    return matrix


def layer(weight: Any, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a linear layer's weight (out, in) and its calibration inputs (tokens, in); SpecError if `in` differs.

    `inputs` may have several leading dimensions, as in (batch, seq_len, in); all count as tokens.
    """
    import torch

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
