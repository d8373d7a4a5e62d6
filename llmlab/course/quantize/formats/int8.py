"""LLM.int8(): matrix products in int8, with one scale per row on both sides and the few outlier features in floats.

Dettmers et al., arXiv 2208.07339, section 3. From about 6.7B parameters on, a few features of the hidden states are 20
times as large as the others; with one scale per token, few codes are left for the others. A feature (column) that
reaches the threshold for any token of the batch is multiplied in the input's own precision.

x (T, I) inputs; weight (O, I); T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....base.errors import SpecError
from ..checks import as_matrix


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (T, I) int8 and absmax (T,) float32 of x (T, I); codes: 127 · x / absmax, rounded half to even."""
    matrix = as_matrix(x, "x")
    absmax = matrix.abs().amax(dim=1).float()
    steps = torch.where(absmax == 0, torch.zeros_like(absmax), 127.0 / absmax)
    return (matrix * steps.unsqueeze(1)).round().to(torch.int8), absmax


def outlier_columns(x: Tensor, threshold: float = 6.0) -> Tensor:
    """Return the indices of the features that reach `threshold` in any token; none if the threshold is 0."""
    if not isinstance(threshold, (int, float)) or not 0 <= threshold < float("inf"):
        raise SpecError(f"threshold={threshold!r} is not a number >= 0; 6.0 is usual, with 0 there are no outliers")
    if threshold == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    return (x.abs() >= threshold).any(dim=0).nonzero().reshape(-1)


def linear_int8(x: Tensor, codes: Tensor, absmax: Tensor, threshold: float = 6.0) -> Tensor:
    """Return x Wᵀ (T, O) in x's dtype; W is given in int8, as `codes` (O, I) and `absmax` (O,) of `quantize_rows`.

    Raises SpecError for sizes that do not match and inputs that are not finite.
    """
    matrix = as_matrix(x, "x")
    if matrix.shape[1] != codes.shape[1] or len(absmax) != len(codes):
        raise SpecError(
            f"x {tuple(x.shape)}, codes {tuple(codes.shape)} and absmax {tuple(absmax.shape)} do not fit; "
            f"give x (tokens, {codes.shape[1]}) and absmax ({len(codes)},)"
        )
    outliers = outlier_columns(matrix, threshold)
    regular = matrix.clone()
    regular[:, outliers] = 0
    x_codes, x_absmax = quantize_rows(regular)
    # Integers below 2^53: float64 sums them exactly on every device, as int32 does in the real kernel.
    sums = x_codes.double() @ codes.double().T
    regular_part = sums * (x_absmax.double().unsqueeze(1) * absmax.double()) / 127**2
    outlier_weight = codes[:, outliers].double() * absmax.double().unsqueeze(1) / 127
    return (regular_part + matrix[:, outliers].double() @ outlier_weight.T).to(x.dtype)


class Int8Linear(nn.Module):
    """LLM.int8(): int8 products, but features that reach `threshold` in the input's precision; 0: all in int8."""

    def __init__(self, linear: nn.Linear, threshold: float = 6.0) -> None:
        super().__init__()
        self.codes, self.absmax = quantize_rows(linear.weight.detach())
        self.bias, self.threshold = linear.bias, threshold

    def forward(self, x: Tensor) -> Tensor:
        y = linear_int8(x.reshape(-1, x.shape[-1]), self.codes, self.absmax, self.threshold)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
