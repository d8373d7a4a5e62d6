"""GPTQ: round the weights column by column, and change the columns not yet rounded to compensate for each error.

Frantar et al., arXiv 2210.17323, algorithm 1. The layer's loss is quadratic, |X Wᵀ - X Qᵀ|², with the Hessian
H = 2 Xᵀ X the same for every row of W; so one Cholesky factor serves all rows.

W (O, I) weight; X (tokens, I) inputs; H (I, I); U (I, I) upper triangular.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....base.errors import SpecError
from ..checks import check_bits, check_group, layer
from ..formats.affine import Quantized, scale_and_zero, to_codes


def gptq(
    weight: Tensor,
    inputs: Tensor,
    bits: int = 4,
    group: int | None = 128,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    damping: float = 0.01,
) -> Quantized:
    """Return `weight` (O, I) quantized to 2^bits levels so that the outputs for `inputs` (tokens, I) change least.

    Each run of `group` columns has one scale per row, computed when the run is reached, from weights already corrected;
    None is one scale per row. `act_order` rounds the columns with the largest inputs first, while all others can still
    compensate; the result's `group_of` then says which columns share a scale. `damping` is added to H's diagonal, as a
    share of its mean. Raises SpecError for sizes that do not match, values that are not finite, and a Hessian that has
    no inverse.
    """
    weight, inputs = layer(weight, inputs)
    rows, columns = weight.shape
    group = check_group(group, columns)
    check_bits(bits)
    hessian = damped_hessian(inputs, damping)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    order = order.to(weight.device)
    W = weight[:, order].clone()
    U = inverse_factor(hessian[order][:, order])

    codes = torch.empty_like(W)
    scale, zero = W.new_empty(rows, columns // group), W.new_empty(rows, columns // group)
    # A column's error corrects the rest of its block at once, and all later columns when the block is done: the same
    # sums, as one product. A block ends where a group does, because the next group's scale needs corrected columns.
    block = group if group < columns else 128
    for start in range(0, columns, block):
        end = min(start + block, columns)
        errors = W.new_zeros(rows, end - start)
        for i in range(start, end):
            g = i // group
            if i % group == 0:
                scale[:, g : g + 1], zero[:, g : g + 1] = scale_and_zero(W[:, i : i + group], bits, symmetric)
            codes[:, i] = to_codes(W[:, i], scale[:, g], zero[:, g], bits)
            error = (W[:, i] - (codes[:, i] - zero[:, g]) * scale[:, g]) / U[i, i]
            W[:, i + 1 : end] -= torch.outer(error, U[i, i + 1 : end])
            errors[:, i - start] = error
        W[:, end:] -= errors @ U[start:end, end:]

    back = order.argsort()
    group_of = back // group if act_order else None
    return Quantized(codes[:, back].to(torch.uint8), scale, zero, bits, group_of)


def damped_hessian(inputs: Tensor, damping: float) -> Tensor:
    """Return H = 2 Xᵀ X / tokens (I, I), with `damping` times the mean of its diagonal added to the diagonal.

    Without damping H has no inverse if a feature is always 0, or if there are fewer tokens than features.
    """
    if not isinstance(damping, (int, float)) or not 0 <= damping < float("inf"):
        raise SpecError(f"damping={damping!r} is not a number >= 0; 0.01 is usual")
    hessian = 2 / len(inputs) * inputs.T @ inputs
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    return hessian


def inverse_factor(hessian: Tensor) -> Tensor:
    """Return U, upper triangular, with Uᵀ U = H⁻¹: row i says how column i's error changes the columns after it.

    Row i of U is the first row of the inverse of H without columns 0 … i - 1, divided by the root of that row's first
    element: so one factorization replaces an inverse for each column (section 3.3, step 3).
    """
    try:
        lower = torch.linalg.cholesky(hessian)
        return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    except torch.linalg.LinAlgError:
        raise SpecError(
            f"the Hessian of {len(hessian)} features has no inverse: inputs are all 0, or too few for so small a "
            "damping; give more tokens, or damping=0.01 or more"
        ) from None
