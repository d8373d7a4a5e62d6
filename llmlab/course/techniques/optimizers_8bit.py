"""8-bit Adam from scratch: block-wise dynamic quantization of the two moments (Dettmers et al., arXiv 2110.02861).

Each block of 256 numbers is divided by its largest magnitude (`absmax`, fp32), and each quotient becomes the index of
the nearest of 256 values. These values are dense near 0: they span seven powers of ten, while int8 spans two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .optimizers import AdamW

BLOCK = 256  # numbers that share one absmax (bitsandbytes/optim/optimizer.py, blocksize)
MIN_8BIT_SIZE = 4096  # smaller tensors keep fp32 states: norms and biases (bitsandbytes, min_8bit_size)
CPU_BINS = 65536  # bitsandbytes' CPU kernel first rounds to this many numbers (csrc/cpu_ops.cpp, kLUTSize)


def dynamic_code(signed: bool = True) -> Tensor:
    """Return the 256 values that a byte can represent, fp32, ascending, in [−1, 1] (unsigned: in [0, 1]).

    For each exponent e from 0 down to −6 the interval 10^e · [0.1, 1] is cut into equal pieces, half as many for each
    lower power of ten, and the middle of each piece is a value; 0 and 1 are added (section 2.2).
    """
    values = [0.0, 1.0]
    for e in range(-6, 1):
        pieces = 2 ** (e + 6 + (not signed))
        edges = torch.linspace(0.1, 1, pieces + 1)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0**e).tolist()
        values += middles + [-value for value in middles] if signed else middles
    return torch.tensor(sorted(values))


def quantize(x: Tensor, code: Tensor, block: int = BLOCK, bins: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the index of the nearest value, uint8, shape of `x`, and absmax, fp32, one per block of `block` numbers.

    `bins`: first round the quotients to this many equally spaced numbers, as bitsandbytes does on a CPU.
    """
    blocks = in_blocks(x.float().flatten(), block)  # (blocks, block)
    absmax = blocks.abs().amax(1)  # (blocks,)
    quotients = blocks * (1 / absmax)[:, None]
    if bins:
        index = ((quotients + 1) * 0.5 * (bins - 1) + 0.5).floor()
        quotients = -1 + 2 * index / (bins - 1)
    middles = (code[1:] + code[:-1]) / 2
    index = torch.bucketize(quotients.contiguous(), middles.to(x.device)).to(torch.uint8)
    index[absmax == 0] = 0  # any value times 0
    return index.flatten()[: x.numel()].view(x.shape), absmax


def dequantize(index: Tensor, absmax: Tensor, code: Tensor, block: int = BLOCK) -> Tensor:
    """Return value × absmax of its block, fp32, shape of `index`."""
    values = in_blocks(code.to(index.device)[index.flatten().long()], block) * absmax[:, None]
    return values.flatten()[: index.numel()].view(index.shape)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Return the vector `x` as rows of `block` numbers, the last one padded with zeros."""
    return torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)


class AdamW8bit(AdamW):
    """AdamW that stores each moment as bytes and absmax between steps, and updates fp32 copies within a step.

    `min_8bit_size`: tensors with fewer numbers keep fp32 moments. `code` is a function of `signed`; `block` and `bins`
    are as in `quantize`.
    """

    def __init__(
        self, parameters, lr: float, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
        min_8bit_size: int = MIN_8BIT_SIZE, block: int = BLOCK, code=dynamic_code, bins: int | None = None,
    ):  # fmt: skip
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.min_8bit_size, self.block, self.bins = min_8bit_size, block, bins
        self.codes = {"m": code(signed=True), "v": code(signed=False)}  # squares have no sign

    def update(self, w, g, state, group):
        if w.numel() < self.min_8bit_size:
            return super().update(w, g, state, group)
        moments = {"step": state["step"]}
        for name, code in self.codes.items():
            if name in state:
                moments[name] = dequantize(state[name], state[name + "_absmax"], code, self.block)
        super().update(w, g, moments, group)
        for name, code in self.codes.items():
            state[name], state[name + "_absmax"] = quantize(moments[name], code, self.block, self.bins)
