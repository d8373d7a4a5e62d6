"""The TOML tables beside this module: how they are read, how a source is spelt out, how an entry is found by its name.

A source says `[document]` for what the table's `[documents]` names once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..base.errors import unknown_name

Entry = TypeVar("Entry")


def read_table(name: str) -> dict[str, Any]:
    """Return the TOML file `name` that lies beside this module."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


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
