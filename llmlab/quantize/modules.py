"""Linear layers with weights and activations in int8 (W8A8), so that a GPU's int8 matrix units can compute them.

x (…, I): inputs, as nn.Linear takes them.
"""

from __future__ import annotations

from torch import Tensor, nn

from .algorithms.smoothquant import linear_w8a8, smoothquant
from .formats.int8 import linear_int8, quantize_rows


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


class SmoothLinear(nn.Module):
    """SmoothQuant: W8A8 after outliers moved from activations to weights, by calibration `inputs` (tokens, I)."""

    def __init__(self, linear: nn.Linear, inputs: Tensor, alpha: float = 0.5) -> None:
        super().__init__()
        self.quantized = smoothquant(linear.weight.detach(), inputs, alpha)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = linear_w8a8(x.reshape(-1, x.shape[-1]), self.quantized).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
