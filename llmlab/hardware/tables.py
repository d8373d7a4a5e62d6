"""The TOML tables beside this module: how they are read, how an entry becomes values, and is found by its name.

A key ends with its unit, and a source says `[document]` for what the table's `[documents]` names once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ..base.errors import unknown_name
from ..base.units import GB, MiB

UNITS: dict[str, Callable[[float], float]] = {  # the ends of keys, longest first, and the value in bytes, s and W
    "_bytes": lambda value: value,
    "_gb_s": lambda value: value * 1e9,
    "_mib": lambda value: round(value * MiB),
    "_gb": lambda value: round(value * GB),
    "_us": lambda value: value * 1e-6,
    "_w": float,
}
Entry = TypeVar("Entry")


@cache
def read_table(name: str) -> dict[str, Any]:
    """Return the TOML file `name` that lies beside this module; read once, so change nothing in it."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def values_of(entry: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry's values by their keys without the unit, in bytes and seconds; lists as tuples, `source` cited.

    >>> values_of({"bandwidth_gb_s": 450, "cards": ["T4"]}, {"checked": "2026-11-21"})
    {'checked': '2026-11-21', 'bandwidth': 450000000000.0, 'cards': ('T4',)}
    """
    values = {"checked": table["checked"]} if "checked" in table else {}
    for key, value in entry.items():
        unit = next((unit for unit in UNITS if key.endswith(unit)), None)
        if isinstance(value, list):
            value = tuple(value)
        elif key == "source":
            value = cited(value, table["documents"])
        values[key.removesuffix(unit or "")] = UNITS[unit](value) if unit else value
    return values


def cited(text: str, documents: Mapping[str, str]) -> str:
    """Return `text` with each `[name]` written out; raises KeyError for a document the table does not have.

    >>> cited("[ddr], 6 channels", {"ddr": "data sheet"})
    'data sheet, 6 channels'
    """
    return re.sub(r"\[(\w+)\]", lambda found: documents[found[1]], text)


def named(kind: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    """Return the entry called `name`; case does not count. Raises UnknownName, of a `kind`, with the nearest ones."""
    for known, found in entries.items():
        if known.lower() == str(name).lower():
            return found
    raise unknown_name(kind, str(name), list(entries), f"The table has {', '.join(entries)}.")
