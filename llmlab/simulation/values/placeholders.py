"""Placeholders for values read from the simulated card, and the errors where a placeholder will not do.

Tensors on the card have no values. What a script only shows, stores or compares with a bound is a placeholder, 1.0 for
floats, 0 for whole numbers and False for flags, or what the user assumes; a comparison says so once at its line, and
assertions hold. What would decide a shape raises NotAvailable, with the line of the script: of a plain `int(x)` the
source says what becomes of it (uses.py).
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, SupportsIndex

import torch

from ...base.errors import LabWarning, NotAvailable
from ...base.files import is_library
from .. import FOLDER
from .uses import asserted, decides_loop, is_only_a_value, is_only_checked

PLACEHOLDER = 1.0  # what float(), numpy() and C code get of a float that was computed on the card
UNKNOWN = "?"  # what printing it shows
ENDLESS = 1000  # times that a loop goes on by a placeholder before it is refused
OURS = (FOLDER, os.path.dirname(torch.__file__))
WAY_ROUND = (
    "compute it from Python numbers, shapes or tensors on the host; or set all numbers that are read with "
    "llmlab run --assume 1 (lab.simulator(..., assume=1.0)); or lab.measure it"
)
_loops: Counter[tuple[str, int]] = Counter()  # by line: how often a loop went on by a placeholder
CHECKED = "deepspeed.runtime."  # it compares norms with what they are where a gradient is not finite
# By operator: what asks for the values, and what else would do.
READERS = {
    "nonzero": ("nonzero(), x[mask] or torch.where(mask)", "torch.where(mask, a, b) and x * mask keep the shape"),
    "index": ("x[mask]", "torch.where(mask, a, b) and x * mask keep the shape"),
    "masked_select": ("masked_select()", "torch.where(mask, a, b) and x * mask keep the shape"),
    "bincount": ("bincount()", "give it minlength, and the bins are assumed to be even"),
    "repeat_interleave": ("repeat_interleave() by a tensor", ""),
    "_unique2": ("unique()", ""),
    "unique_dim": ("unique()", ""),
    "unique_consecutive": ("unique_consecutive()", ""),
    "_pack_padded_sequence": ("pack_padded_sequence()", "keep the lengths on the host"),
    "_local_scalar_dense": (
        "an operator that reads a number from a tensor",
        "give it a Python number, or set all numbers that are read with llmlab run --assume 1 (lab.simulator(..., "
        "assume=1.0))",
    ),
}


def located(error: NotAvailable) -> NotAvailable:
    """Return `error` with the line of the user's code that led to it, and before it a library's in between."""
    if ", line " in str(error):
        return error
    lines: list[str] = []
    for frame in _outside(sys._getframe(1)):
        file = frame.f_code.co_filename
        library = is_library(file)
        if not (library and lines):
            lines.append(f"{file}, line {frame.f_lineno}")
        if not library:
            break
    return NotAvailable(f"{error} ({', called from '.join(lines)})") if lines else error


def _outside(frame: FrameType | None) -> list[FrameType]:
    """Return `frame` and its callers that are neither torch's nor of this package."""
    frames = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*OURS, "<eval_with_key>")):  # of torch.fx
            frames.append(frame)
        frame = frame.f_back
    return frames


def refuse(operator: str, why: str) -> NotAvailable:
    """Return the error for reading a value that is not known."""
    return located(NotAvailable(f"{operator} {why}, and tensors on the simulated GPU have no values: {WAY_ROUND}"))


def needs_values(func: Any) -> NotAvailable:
    """Return the error for operator `func`, which reads values or whose output's size depends on them."""
    asked, instead = READERS.get(func._schema.name.split("::")[-1], ("", ""))
    return located(NotAvailable(
        f"{func}{f', which is {asked},' if asked else ''} needs the values of a tensor, and tensors that the simulated "
        f"GPU computed have none: {f'{instead}; ' if instead else ''}give it a tensor made on the host, whose values "
        "are known, or lab.measure it"
    ))  # fmt: skip


def asked_by_torch() -> str:
    """Return the name of the torch module whose Python code reads a value, "" where it is other code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS[0]):
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "") if frame else ""
    return name if name.startswith("torch.") else ""


def asked_by(package: str) -> bool:
    """Return whether code of `package`, a name that ends with a dot, called torch or what stands in its place."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith(package)


def initializing() -> bool:
    """Return whether torch.nn.init asks: trunc_normal_ draws again what is out of bounds, and nothing is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.nn.init":
        frame = frame.f_back
    return frame is not None


def decided(what: str, placeholder: bool) -> bool:
    """Return what `what`, on which code may branch, stands for: `placeholder`, or what an assertion wants of it.

    Raises NotAvailable where a loop has gone on by it ENDLESS times.
    """
    if asked_by_torch().startswith("torch.distributions."):  # whether parameters are valid, and draws accepted
        return True
    warn_of(what)
    frame = next(iter(_outside(sys._getframe(1))), None)
    if frame is None:
        return placeholder
    if decides_loop(frame):
        line = frame.f_code.co_filename, frame.f_lineno
        _loops[line] += 1
        if _loops[line] > ENDLESS:
            del _loops[line]
            raise refuse(what, f"has kept a loop going {ENDLESS} times")
    wanted = asserted(frame)
    return placeholder if wanted is None else wanted


def whole(what: str, number: float) -> int:
    """Return the whole number that stands for one that code reads by `what`; raises NotAvailable where it may become a
    size."""
    frame = next(iter(_outside(sys._getframe(1))), None)
    if frame is None or not is_only_a_value(frame):
        raise refuse(what, "takes a whole number from a value, which may become a size")
    warn_of(what)
    return int(number)


def only_checked(what: str) -> bool:
    """Return whether code only checks the tensor that its running call returns, so that any will do; if so, say once
    that `what` gives a placeholder."""
    frame = next(iter(_outside(sys._getframe(1))), None)
    if frame is None or not is_only_checked(frame):
        return False
    warn_of(what)
    return True


def warn_of(what: str) -> None:
    """Say once, at the line of the user's code, that `what` gives placeholders as plain numbers."""
    if asked_by(CHECKED):
        return
    frames = _outside(sys._getframe(1))
    own = (frame for frame in frames if not is_library(frame.f_code.co_filename))
    frame = next(own, frames[0] if frames else None)
    if frame is not None:
        message = (
            f"{what} reads a placeholder ({PLACEHOLDER}, or 0 for integers), because tensors on the simulated GPU have "
            "no values. Results and decisions that depend on it differ from those on a GPU."
        )
        registry = frame.f_globals.setdefault("__warningregistry__", {})  # in which Python keeps what it has said
        warnings.warn_explicit(message, LabWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry)


def value_for(dtype: torch.dtype, assume: float | None) -> Any:
    """Return the number that stands for one of `dtype` that is not known: what the user assumes, else 1.0 or 0."""
    value = assume if assume is not None else PLACEHOLDER if dtype.is_floating_point else 0
    if dtype.is_floating_point or dtype.is_complex:
        return float(value)
    return bool(value) if dtype == torch.bool else int(value)


class Unknown(float):
    """A number that was read from the card: it can be computed with, printed, stored and compared; it sizes nothing."""

    def __int__(self) -> int:
        return whole("int()", float.__add__(self, 0.0))

    __index__ = __trunc__ = __floor__ = __ceil__ = __int__

    def __float__(self) -> float:
        warn_of("float()")
        return float.__add__(self, 0.0)

    def __round__(self, digits: SupportsIndex | None = None, /) -> Any:  # of a float, an int without digits
        return self

    def __repr__(self) -> str:
        return UNKNOWN

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format_unknown(spec)

    def __reduce__(self) -> tuple:
        return float, (float.__add__(self, 0.0),)


class Whole(int):
    """A whole number of a list that was read from the card: it is shown, stored and compared; it sizes no tensor."""

    def __repr__(self) -> str:
        return UNKNOWN

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format_unknown(spec)

    def __reduce__(self) -> tuple:
        return int, (int.__add__(self, 0),)


# torch's own errors name the type: "argument 'size' must be tuple of ints, not ..."
Unknown.__name__ = "a value that the simulated GPU does not have"


def _compared(name: str) -> Callable:
    operation = getattr(float, name)

    def compare(self: Unknown, *others: Any) -> Any:
        # `x != x` asks whether it is NaN, and so does a comparison with what is not finite.
        asks_if_finite = others and (others[0] is self or (isinstance(others[0], float) and others[0] - others[0] != 0))
        result = operation(self, *others)
        return result if asks_if_finite or result is NotImplemented else decided("a comparison", result)

    return compare


def _computed(kind: type, name: str) -> Callable:
    operation = getattr(kind, name)

    def compute(self: Any, *others: Any) -> Any:
        result = operation(self, *others)
        return Whole(result) if type(result) is int else Unknown(result) if type(result) is float else result

    return compute


for _kind, _plain in ((Unknown, float), (Whole, int)):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        for _side in (f"__{_name}__", f"__r{_name}__"):
            setattr(_kind, _side, _computed(_plain, _side))
    for _name in ("__neg__", "__pos__", "__abs__"):
        setattr(_kind, _name, _computed(_plain, _name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool"):
    setattr(Unknown, f"__{_name}__", _compared(f"__{_name}__"))

_SPEC = re.compile(r"(?:(.)?([<>=^]))?[-+ ]?z?#?0?(\d+)?")


def format_unknown(spec: str) -> str:
    """Return the sign for a value that is not known, as wide as a format specification for a number asks."""
    match = _SPEC.match(spec)
    assert match is not None  # all of it is optional
    fill, align, width = match.groups()
    return format(UNKNOWN, f"{fill or ' '}{'>' if align in (None, '=') else align}{width or ''}")
