"""The TOML tables in this folder: reading them, converting their entries, and finding an entry by name.

A key ends with its unit. A source may contain `[document]`, which the table's `[documents]` spells out.
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

UNITS: dict[str, Callable[[float], float]] = {  # by suffix of the key, longest first: conversion to bytes, s and W
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
    """Return the content of the TOML file `name` in this folder. It is cached, so callers must not change it."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def values_of(entry: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry's values in bytes and seconds, by key without unit; lists become tuples, and `source` is cited.

    >>> values_of({"bandwidth_gb_s": 450, "gpu_names": ["T4"]}, {"checked": "2026-11-21"})
    {'checked': '2026-11-21', 'bandwidth': 450000000000.0, 'gpu_names': ('T4',)}
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
    """Return `text` with each `[name]` spelled out; raises KeyError for a document that is not in the table.

    >>> cited("[ddr], 6 channels", {"ddr": "data sheet"})
    'data sheet, 6 channels'
    """
    return re.sub(r"\[(\w+)\]", lambda match: documents[match[1]], text)


def named(kind: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    """Return the entry called `name`; case is ignored. Raises UnknownName, for this `kind`, with the nearest names."""
    for key, entry in entries.items():
        if key.lower() == str(name).lower():
            return entry
    raise unknown_name(kind, str(name), list(entries), f"Give one of {', '.join(entries)}.")
