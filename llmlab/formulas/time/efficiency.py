"""The rates that a GPU reached in measurements, as opposed to its data sheet: one table, derived from records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from ...hardware.gpu import GPU, clocks
from ...hardware.gpu import gpu as find_gpu
from ...hardware.tables import read_table


@dataclass(frozen=True, eq=False)  # one object per GPU, hashed by identity
class Efficiency:
    """Rates of one GPU, and times of its host, derived from the records in `derived_from`.

    `bandwidth`, `strided` (some tensor is not contiguous) and `gather` (rows picked from a table): bytes/s. `matmul`,
    `attention`: FLOP/s by dtype, of large matmuls and of fused attention, for which only the half that a causal mask
    leaves counts. `launch`: the least s of a kernel. `serial`: s per element of a sum that a single block computes
    (nll_loss). `dispatch`, `view`: s of the CPU for an operator with a kernel, and for one without; `custom`: its
    additional s for an operator that a Python library registered; `backward_dispatch`: its time in the backward pass as
    a share of that in the forward pass. `cache`: bytes of second-level cache that a multiprocessor reaches. `validated`
    says what held-out records showed.
    """

    gpu: str
    sms: int
    bandwidth: float
    matmul: Mapping[str, float]
    attention: Mapping[str, float] = field(default_factory=dict)
    strided: float = 0.0
    gather: float = 0.0
    launch: float = 0.0
    serial: float = 0.0
    dispatch: float = 0.0
    view: float = 0.0
    backward_dispatch: float = 1.0
    custom: float = 0.0
    cache: float = 0.0
    derived_from: str = ""
    validated: str = ""
    derived: str = ""  # the date

    def exceeds_cache(self, row: float) -> bool:
        """Return whether rows of `row` bytes do not fit in the cache: each multiprocessor runs two blocks of 1024
        threads, and each block goes over a row."""
        return 2 * self.sms * row > self.cache


@cache
def efficiencies() -> dict[str, Efficiency]:
    """Return every GPU's efficiency by its name. The time of a library's operator was measured on one host only; on the
    others, it is the same multiple of `dispatch`."""
    entries = read_table("efficiencies.toml")["efficiency"]
    table = {entry["gpu"]: Efficiency(sms=find_gpu(entry["gpu"]).sms, **entry) for entry in entries}
    operators = max(rates.custom / rates.dispatch for rates in table.values() if rates.dispatch)
    return {gpu: rates if rates.custom else replace(rates, custom=operators * rates.dispatch)
            for gpu, rates in table.items()}  # fmt: skip


def efficiency(gpu: GPU | str) -> Efficiency | None:
    """Return the GPU's measured rates, or None if it was not measured: another GPU's rates would be wrong. Under a
    power limit, its FLOP/s are lower by the same factor as its clocks.

    >>> efficiency("B200") is None
    True
    """
    data_sheet = find_gpu(gpu)
    rates, share = efficiencies().get(data_sheet.name), clocks(data_sheet)
    if rates is None or share == 1:
        return rates
    matmul, attention = ({dtype: share * rate for dtype, rate in by.items()} for by in (rates.matmul, rates.attention))
    return replace(rates, matmul=matmul, attention=attention)
