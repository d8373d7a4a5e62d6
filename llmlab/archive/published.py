"""Single figures that others published: what was measured, the set-up, the values with their unit, and the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import SpecError, unknown_name
from .lookup import load


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One published figure, or one small table of them.

    `values` maps a label to a number in `unit` (sizes in bytes, times in s, rates in FLOP/s or tokens/s). `gpu` is the
    GPU as the source names it, None where it names none or several. `formula` is given where the source gives one;
    its coefficients are then the values. `notes` says what the source does not state and what was converted.
    """

    key: str
    what: str
    setup: str
    values: Mapping[str, float]
    unit: str
    source: str
    gpu: str | None = None
    formula: str | None = None
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("key", "what", "setup", "unit", "source"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise SpecError(f"figure {self.key!r} lacks {name!r}")
        numbers = self.values.values()
        if not numbers or any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in numbers):
            raise SpecError(f"figure {self.key!r} needs numbers as values; it has {dict(self.values)}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Figure:
        """Return the figure that a record describes."""
        return cls(**{**data, "notes": tuple(data.get("notes", ()))})

    @property
    def value(self) -> float:
        """The number, where there is only one; SpecError where there are several."""
        if len(self.values) != 1:
            raise SpecError(f"figure {self.key!r} has several values: {', '.join(self.values)}; use .values[...]")
        return next(iter(self.values.values()))

    def __getitem__(self, label: str) -> float:
        if label not in self.values:
            raise unknown_name("value", label, list(self.values), f"Figure {self.key!r} has these.")
        return self.values[label]


def figures() -> dict[str, Figure]:
    """Return every published figure by its key."""
    return {figure.key: figure for figure in load("figures", Figure.from_dict)}


def figure(key: str) -> Figure:
    """Return one published figure; an unknown key raises UnknownName with the nearest ones.

    >>> figure("zero-7.5b-mixed-adam")["stage 3"]
    1900000000
    """
    known = figures()
    if key not in known:
        raise unknown_name("figure", key, list(known), "llmlab.archive.figures() lists them all.")
    return known[key]
