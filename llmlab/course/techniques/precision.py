"""Low precision from scratch: number formats bit by bit, loss scaling, stochastic rounding and fp32 master weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...base.errors import SpecError

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: one sign bit, `exponent` bits, `mantissa` bits (IEEE 754-2019, section 3.4).

    With `infinities=False`, as in e4m3, the top exponent encodes numbers too, and only its last pattern is NaN. Values
    that are too large become the largest number (OCP 8-bit Floating Point Specification 1.0, sections 5.2 and 5.3).
    """

    name: str
    exponent: int
    mantissa: int
    infinities: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def top(self) -> int:
        """The pattern of the largest number. The next pattern is infinity, or NaN in e4m3."""
        return (1 << (self.bits - 1)) - 2 if not self.infinities else ((1 << self.exponent) - 1 << self.mantissa) - 1

    @property
    def largest(self) -> float:
        return self.decode(self.top)

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest number above zero: subnormal, with one significant bit."""
        return self.decode(1)

    def spacing(self, value: float) -> float:
        """Return the distance between neighbours around `value`; it is constant below the smallest normal number."""
        return 2.0 ** (self._exponent(value) - self.mantissa)

    def _exponent(self, value: float) -> int:
        """Return e of value = 1.xxx · 2^e, or e of the smallest normal number if `value` is smaller."""
        return max(math.frexp(value)[1] - 1, 1 - self.bias) if value else 1 - self.bias

    def decode(self, pattern: int) -> float:
        """Return the number that `pattern`, 0 <= pattern < 2^bits, encodes."""
        if not 0 <= pattern < 1 << self.bits:
            raise SpecError(f"pattern={pattern} is not a pattern of {self.name}; give 0 to {(1 << self.bits) - 1}")
        sign = -1.0 if pattern >> (self.bits - 1) else 1.0
        size = pattern & ((1 << (self.bits - 1)) - 1)
        if size > self.top:
            return sign * math.inf if self.infinities and size == self.top + 1 else math.nan
        exponent, fraction = size >> self.mantissa, size & ((1 << self.mantissa) - 1)
        if exponent == 0:  # subnormal: no leading one, the exponent of the smallest normal number
            return sign * fraction * 2.0 ** (1 - self.bias - self.mantissa)
        return sign * ((1 << self.mantissa) + fraction) * 2.0 ** (exponent - self.bias - self.mantissa)

    def encode(self, value: float) -> int:
        """Return the pattern of the number nearest to `value`; a tie goes to the pattern that ends in 0.

        Positive patterns, read as whole numbers, have the order of the numbers that they encode, so a mantissa that
        rounds up to 2 carries into the exponent by itself.
        """
        sign = int(math.copysign(1, value) < 0) << (self.bits - 1)
        if math.isnan(value):
            return sign | (1 << (self.bits - 1)) - 1  # all ones
        if math.isinf(value):
            return sign | self.top + self.infinities
        units = round(abs(value) / self.spacing(value))  # half to even; the division by a power of two is exact
        pattern = (self._exponent(value) + self.bias - 1 << self.mantissa) + units
        return sign | min(pattern, self.top + self.infinities)

    def round(self, value: float) -> float:
        """Return `value` rounded to this format."""
        return self.decode(self.encode(value))


# tf32 is not a storage format: it is the 19 bits of an fp32 number that a tensor core reads.
FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 8, 23),
        Format("tf32", 8, 10),
        Format("fp16", 5, 10),
        Format("bf16", 8, 7),
        Format("fp8-e4m3", 4, 3, infinities=False),
        Format("fp8-e5m2", 5, 2),
    )
}


class LossScaler:
    """Scales the loss so that small gradients do not underflow in fp16, and unscales the gradients before the update.

    The scale adapts: an infinite or NaN gradient halves it and skips the update, and `interval` finite steps in a row
    double it (Micikevicius et al., arXiv 1710.03740, section 3.2; torch/amp/grad_scaler.py).
    """

    def __init__(self, scale: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> None:
        self.factor, self.growth, self.backoff, self.interval = torch.tensor(scale), growth, backoff, interval
        self.finite_steps = 0  # in a row
        self.finite: bool | None = None  # whether this step's gradients are finite; None until they are unscaled

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward() on."""
        return loss * self.factor.to(loss.device)

    @torch.no_grad()
    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once per step, and before clipping, which needs their true norm."""
        if self.finite is not None:
            raise SpecError("unscale() was already called in this step; call update() first")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise SpecError("gradients in torch.float16 would underflow again; keep the weights in fp32 (autocast)")
        self.finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            gradient.mul_(inverse.to(gradient.device))

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Run the optimizer unless a gradient is infinite or NaN; return whether it ran."""
        if self.finite is None:
            self.unscale(optimizer)
        if self.finite:
            optimizer.step()
        return bool(self.finite)

    def update(self) -> None:
        """Adapt the scale for the next step."""
        self.finite_steps = self.finite_steps + 1 if self.finite else 0
        if not self.finite:
            self.factor = (self.factor.double() * self.backoff).float()
        elif self.finite_steps == self.interval:
            grown = (self.factor.double() * self.growth).float()
            self.factor = grown if grown.isfinite() else self.factor
            self.finite_steps = 0
        self.finite = None


def stochastic_round(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round fp32 `values` to bf16, up or down at random, so that the expected value is exact.

    A bf16 number is the upper half of an fp32 number. Adding a random lower half
    carries into the upper half with probability (lower half) / 2^16, which is the
    distance to the lower neighbor in units of the spacing (Gupta et al., arXiv
    1502.02551, section 3).
    """
    if values.dtype != torch.float32:
        raise SpecError(f"values are {values.dtype}; give torch.float32")
    noise = torch.randint(
        1 << 16, values.shape, generator=generator, dtype=torch.int32, device=values.device
    )
    rounded = ((values.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


class MasterWeights:
    """fp32 copies of 16-bit parameters; the optimizer updates the copies.

    In each step, call copy_gradients(), then the optimizer, then copy_weights(). The
    optimizer updates parameters that are not 16-bit directly (Micikevicius et al.,
    arXiv 1710.03740, section 3.1).
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters: list[nn.Parameter] = []  # for the optimizer
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (16-bit, fp32)
        for parameter in parameters:
            if parameter.dtype in HALF:
                master = nn.Parameter(parameter.detach().float())
                self.pairs.append((parameter, master))
                self.parameters.append(master)
            else:
                self.parameters.append(parameter)

    def copy_gradients(self) -> None:
        """Cast each 16-bit gradient to fp32 for the optimizer, and free it before the next one.

        Megatron-LM uses the same order (megatron/core/optimizer/optimizer.py).
        """
        for half, master in self.pairs:
            if half.grad is not None:
                master.grad = half.grad.float()
                half.grad = None

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Round each fp32 copy back into its 16-bit parameter."""
        for half, master in self.pairs:
            half.copy_(master)
