"""Counts of unknown values: all bins are assumed to have the same count, and if code only checks which values occur,
all values are assumed to be the same.

A router's tokens are counted for each expert, ranks exchange the counts, and buffers are sized accordingly. A router is
trained to be balanced, but a real one is uneven; the simulated memory is that of an even split, unless the run has an
`expert_imbalance`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...base.compat import disable_current_modes
from ...base.notes import Note
from .known import know
from .placeholders import needs_values, only_checked

aten = torch.ops.aten
DISTINCT = aten._unique2.default
BINS = frozenset((aten.histc.default, aten.bincount.default))
BALANCED = Note(
    "balanced-routing",
    "Counts of values, such as the tokens that a router sends to each expert, are simulated as an even split; real "
    "ones are uneven.",
)


def balance(counts: Tensor, total: int, busiest: float = 1.0, ranks: int = 1) -> None:
    """Set the values of `counts` to a split of `total`: an even one, except that the bins of the first of `ranks`, this
    one, have `busiest` times as many as the mean."""
    bins = max(1, counts.numel())
    own = bins // ranks
    first = round(total * busiest / ranks)
    with disable_current_modes():
        split = torch.tensor(_even(first, own) + _even(total - first, bins - own))
        know(counts, split.to(counts.dtype))


def _even(total: int, bins: int) -> list[int]:
    return [total // bins + (number < total % bins) for number in range(bins)]


def counts_of(run: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Return the output of bincount for unknown values: `minlength` bins, created with `run`, which runs an operator.

    Raises NotAvailable without a `minlength`.
    """
    bins = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    if not bins:
        raise needs_values(func)
    return run(aten.empty.memory_format, [bins], dtype=torch.int64, device=args[0].device)


def distinct_of(run: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the outputs of unique() as if all of its unknown values were the same: one value, its index for each
    element, and one count, created with `run`, which runs an operator.

    Raises NotAvailable unless code only checks the result.
    """
    if not only_checked("unique()"):
        raise needs_values(func)
    x, (_, inverse, counts) = args[0], (*args[1:], *[False] * 3)[:3]
    inverse, counts = kwargs.get("return_inverse", inverse), kwargs.get("return_counts", counts)
    shapes = ([1], x.dtype), (x.shape if inverse else [0], torch.int64), ([1] if counts else [0], torch.int64)
    return tuple(run(aten.empty.memory_format, shape, dtype=dtype, device=x.device) for shape, dtype in shapes)
