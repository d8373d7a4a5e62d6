"""GPTQ: round one column after another, and let the columns still free make up for each error.

Frantar et al., arXiv 2210.17323, algorithm 1. The layer's loss is quadratic, |X Wᵀ - X Qᵀ|², with the Hessian
H = 2 Xᵀ X the same for every row of W; so one Cholesky factor serves all rows.

W (O, I) weight; X (tokens, I) inputs; H (I, I); U (I, I) upper triangular.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.errors import SpecError
from ..checks import check_bits, check_group, layer

if TYPE_CHECKING:
    from torch import Tensor

    from ..formats.affine import Quantized


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

    Each run of `group` columns shares a scale a row, taken when it is reached, from weights already corrected; None is
    one scale a row. `act_order` takes the columns with the largest inputs first, while all others can still correct;
    which columns share a scale is then in `group_of`. `damping` is added to H's diagonal, as a share of its mean.
    Raises SpecError for sizes that do not match, values that are not finite, and a Hessian that has no inverse.
    """
    import torch

    from ..formats.affine import Quantized, scale_and_zero, to_codes

    weight, inputs = layer(weight, inputs)
    rows, columns = weight.shape
    group = check_group(group, columns)
    levels = 2 ** check_bits(bits) - 1
    hessian = damped_hessian(inputs, damping)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(columns)
    order = order.to(weight.device)
    W = weight[:, order].clone()
    U = inverse_factor(hessian[order][:, order])

    codes = torch.empty_like(W)
    scale, zero = W.new_empty(rows, columns // group), W.new_empty(rows, columns // group)
    # Corrections reach the columns of a block at once and all later ones when the block is done: the same sums, in one
    # product. A block ends where a group does, for the group's scale needs its columns up to date.
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

    assert codes.max() <= levels
    back = order.argsort()
    group_of = back // group if act_order else None
    return Quantized(codes[:, back].to(torch.uint8), scale, zero, bits, group_of)


def damped_hessian(inputs: Tensor, damping: float) -> Tensor:
    """Return H = 2 Xᵀ X / tokens (I, I), with `damping` of its mean diagonal added to the diagonal.

    Without it H has no inverse where a feature is always 0, or where there are fewer tokens than features.
    """
    if not isinstance(damping, (int, float)) or not 0 <= damping < float("inf"):
        raise SpecError(f"damping={damping!r} is no number >= 0; 0.01 is the usual one")
    hessian = 2 / len(inputs) * inputs.T @ inputs
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    return hessian


def inverse_factor(hessian: Tensor) -> Tensor:
    """Return U, upper triangular, with Uᵀ U = H⁻¹: row i is what column i's error does to the columns after it.

    Row i of the inverse of H's part that is still free, divided by the root of its own diagonal, is row i of U: that
    is why no inverse needs to be taken again (section 3.3, step 3).
    """
    import torch

    try:
        lower = torch.linalg.cholesky(hessian)
        return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    except torch.linalg.LinAlgError:
        raise SpecError(
            f"the Hessian of {len(hessian)} features has no inverse: inputs are all 0, or too few and damping too "
            "small; give more tokens, or damping=0.01 and above"
        ) from None


def gptq_direct(
    weight: Tensor, inputs: Tensor, bits: int = 4, group: int | None = 128, *, symmetric: bool = False,
    damping: float = 0.01,
) -> Quantized:  # fmt: skip
    """Return what `gptq` must: after every rounding, the free columns are solved for anew. O(I⁴): for small layers.

    With d the change of the columns F that are rounded, the least of the loss over the others R is at
    -d H_FR H_RR⁻¹: the normal equations, and nothing else (Optimal Brain Quantization, arXiv 2208.11580, section 4).
    """
    import torch

    from ..formats.affine import Quantized, scale_and_zero, to_codes

    weight, inputs = layer(weight, inputs)
    rows, columns = weight.shape
    group = check_group(group, columns)
    hessian = damped_hessian(inputs.double(), damping)
    W = weight.double()
    free, codes = W.clone(), torch.empty_like(W)
    scale, zero = W.new_empty(rows, columns // group), W.new_empty(rows, columns // group)
    for i in range(columns):
        g = i // group
        if i % group == 0:
            scale[:, g : g + 1], zero[:, g : g + 1] = scale_and_zero(free[:, i : i + group], bits, symmetric)
        codes[:, i] = to_codes(free[:, i], scale[:, g], zero[:, g], bits)
        free[:, i] = (codes[:, i] - zero[:, g]) * scale[:, g]
        F, R = slice(0, i + 1), slice(i + 1, columns)
        if i + 1 < columns:
            free[:, R] = W[:, R] - torch.linalg.solve(hessian[R, R], hessian[R, F] @ (free[:, F] - W[:, F]).T).T
    return Quantized(codes.to(torch.uint8), scale, zero, check_bits(bits))
