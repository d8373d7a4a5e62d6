"""Errors for the reader: each says what was given, what is allowed, and what to do.

The command line prints these as one line and exits with 2; anything else that escapes is a bug and shows its traceback.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

SCRIPT_FAILED = "the script failed with an error of its own"  # the last line of `llmlab run` after the traceback


class SpecError(ValueError):
    """A value that cannot be: a wrong field, sizes that do not divide, a dtype the chip lacks."""


class UnknownName(LookupError):
    """A model, GPU or record that is not in its table; the message names the nearest ones."""


class NotAvailable(RuntimeError):
    """Something this machine lacks: CUDA, a library, a measurement."""


class LabWarning(UserWarning):
    """A warning of this package, which the command line prints as one; those of libraries keep their place."""


class ScriptFailed(RuntimeError):
    """A script of the reader's ended by an error of its own; the message is its traceback, from its first line on."""


def need_packages(what: str, *packages: str) -> None:
    """Raise NotAvailable, naming those of `packages` that are not installed; all are in the extra llmlab[torch]."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise NotAvailable(f"{what} needs {', '.join(missing)}: pip install 'llmlab[torch]'")


def check_counts(**counts: Any) -> None:
    """Raise SpecError unless each value, named as the caller's own parameter, is a whole number from 1 on.

    >>> check_counts(ranks=0)
    Traceback (most recent call last):
    llmlab.base.errors.SpecError: ranks=0 is not a whole number >= 1
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{name}={value!r} is not a whole number >= 1")


def unknown_name(kind: str, given: str, known: list[str], hint: str) -> UnknownName:
    """Return an `UnknownName` that lists the nearest known names, and `hint`, what to do instead."""
    lowered = {name.lower(): name for name in known}
    near = [lowered[match] for match in get_close_matches(given.lower(), lowered, n=3, cutoff=0.4)]
    nearest = f" Nearest: {', '.join(near)}." if near else ""
    return UnknownName(f"unknown {kind} {given!r}.{nearest} {hint}")
