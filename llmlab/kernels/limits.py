"""The roofline of a kernel on a card's data sheet: bytes over bandwidth or FLOP over peak, the larger of the two."""

from __future__ import annotations

from typing import NamedTuple

from ..hardware.gpu import GPU


class Limit(NamedTuple):
    """The least `seconds`, set by "bytes" or by "FLOP"; `intensity` in FLOP per byte."""

    seconds: float
    by: str
    intensity: float


def limit(card: GPU, moved: float, flops: float, dtype: str = "fp32") -> Limit:
    """Return the limit for `moved` bytes and `flops` FLOP at the card's peak in `dtype`.

    Work outside the matrix units is fp32, whatever dtype is loaded and stored. Williams et al., Roofline, 2009.

    >>> from llmlab import gpu
    >>> limit(gpu("T4"), moved=320e9, flops=8.1e12 / 2)
    Limit(seconds=1.0, by='bytes', intensity=12.65625)
    """
    by_bytes, by_flops = moved / card.bandwidth, flops / card.peak_flops[dtype]
    return Limit(max(by_bytes, by_flops), "bytes" if by_bytes >= by_flops else "FLOP", flops / moved)
