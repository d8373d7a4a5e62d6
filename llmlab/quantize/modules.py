"""Linear layers that compute in int8: weights and activations both, so that the matrix units of int8 do the work.

x (…, I) inputs, as nn.Linear takes them.
"""

from __future__ import annotations

from torch import Tensor, nn

from .algorithms.smoothquant import linear_w8a8, smoothquant
from .formats.int8 import linear_int8, quantize_rows


class Int8Linear(nn.Module):
    """LLM.int8(): features that reach `threshold` apart, in the input's precision; 0 keeps none apart."""

    def __init__(self, linear: nn.Linear, threshold: float = 6.0) -> None:
        super().__init__()
        self.codes, self.absmax = quantize_rows(linear.weight.detach())
        self.bias, self.threshold = linear.bias, threshold

    def forward(self, x: Tensor) -> Tensor:
        y = linear_int8(x.reshape(-1, x.shape[-1]), self.codes, self.absmax, self.threshold)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class SmoothLinear(nn.Module):
    """SmoothQuant: W8A8 with the difficulty shared out, on calibration `inputs` (tokens, I)."""

    def __init__(self, linear: nn.Linear, inputs: Tensor, alpha: float = 0.5) -> None:
        super().__init__()
        self.quantized = smoothquant(linear.weight.detach(), inputs, alpha)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = linear_w8a8(x.reshape(-1, x.shape[-1]), self.quantized).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
