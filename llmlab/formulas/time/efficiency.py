"""What a card was measured to reach, as opposed to what its data sheet says: one table, derived from records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from ...hardware.gpu import GPU, clocks
from ...hardware.gpu import gpu as find_gpu
from ...hardware.tables import read_table


@dataclass(frozen=True, eq=False)  # one for each card: looked up by what it is
class Efficiency:
    """Rates of one card, and seconds that its host takes, as derived from the records that `derived_from` names.

    `bandwidth`, `strided` (some tensor is not contiguous) and `gather` (rows picked from a table): bytes/s. `matmul`,
    `attention`: FLOP/s by dtype, of large products and of fused attention, of which the half that a causal mask leaves
    counts. `launch`: least s of a kernel. `serial`: s per element of a sum that one block does alone (nll_loss).
    `dispatch`, `view`, `custom`: s of the CPU for an operator with a kernel, one without, and one that a Python library
    registered; `backward_dispatch`: the share of it in backward. `cache`: bytes of second-level cache that a
    multiprocessor reaches. `validated` says what held-out records showed.
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


@cache
def efficiencies() -> dict[str, Efficiency]:
    """Return every card's efficiency by the card's name. What a library's operator takes was measured on one host: on
    others it takes as many of theirs."""
    entries = read_table("efficiencies.toml")["efficiency"]
    table = {entry["gpu"]: Efficiency(sms=find_gpu(entry["gpu"]).sms, **entry) for entry in entries}
    operators = max(rates.custom / rates.dispatch for rates in table.values() if rates.dispatch)
    return {gpu: rates if rates.custom else replace(rates, custom=operators * rates.dispatch)
            for gpu, rates in table.items()}  # fmt: skip


def efficiency(card: GPU | str) -> Efficiency | None:
    """Return what the card was measured to reach, or None: another card's rates would be wrong. Under a power limit it
    computes as much slower as its clocks are.

    >>> efficiency("B200") is None
    True
    """
    data_sheet = find_gpu(card)
    rates, share = efficiencies().get(data_sheet.name), clocks(data_sheet)
    if rates is None or share == 1:
        return rates
    matmul, attention = ({dtype: share * rate for dtype, rate in by.items()} for by in (rates.matmul, rates.attention))
    return replace(rates, matmul=matmul, attention=attention)
