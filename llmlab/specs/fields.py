"""The base of all specs of a run: checks that name the field, printing, and JSON.

Written by hand, because cattrs and msgspec check types while they read JSON. Most runs are written in Python, their
errors list the allowed values, and most checks compare fields. With a library, only the twenty lines of
`run_from_dict` could go, and the calculator in the browser would load another package.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, MISSING, InitVar, asdict, dataclass, fields
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

from ..base.errors import SpecError

if TYPE_CHECKING:
    from typing_extensions import Self

MOST = 2**53  # sizes are multiplied and divided as floats, which represent every whole number up to here


def _shown(value: Any) -> str:
    # Python refuses to print numbers of more than 4300 digits, and a number of 20 digits is unreadable.
    huge = isinstance(value, int) and value.bit_length() > 64
    return f"<a number of {value.bit_length()} bits>" if huge else repr(value)


class Spec:
    """Printing and JSON of the specs of runs and stacks; only fields that differ from the defaults are printed."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # each of them is a dataclass

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.differences().items())})"

    def differences(self) -> dict[str, Any]:
        """Return the fields whose value differs from the default."""
        values = self.values()
        return {f.name: values[f.name] for f in fields(self) if f.default is MISSING or values[f.name] != f.default}

    def values(self) -> dict[str, Any]:
        """Return the values of all fields, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)

    def _check_counts(self, *fields: str, least: int = 1) -> None:
        for field in fields:
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int):
                raise SpecError(f"{field}={value!r} is a {type(value).__name__}; give a whole number >= {least}")
            if not least <= value <= MOST:
                wrong, give = ("small", f">= {least}") if value < least else ("large", f"<= {MOST}")
                raise SpecError(f"{field}={_shown(value)} is too {wrong}; give a whole number {give}")

    def _check_choices(self, **allowed: tuple[object, ...]) -> None:
        for field, choices in allowed.items():
            value = getattr(self, field)
            if not any(value is choice or (value == choice and type(value) is type(choice)) for choice in choices):
                raise SpecError(f"{field}={_shown(value)} is not one of {', '.join(map(str, choices))}")


@dataclass(frozen=True, repr=False)
class ChoiceSpec(Spec):
    """A spec that distinguishes a field that was given from one that was left out, even if both hold the default.

    `unset` contains the names of the fields that were not given; comparisons ignore it.
    """

    _: KW_ONLY
    unset: InitVar = frozenset()

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Record `unset`. dataclasses.replace passes the changed fields first and then all others in order, starting
        with `unset`, so every name after `unset` was copied and not given."""
        spec, names = super().__new__(cls), [f.name for f in fields(cls)]
        given_names = {*names[: len(args)], *takewhile(lambda name: name != "unset", values)}
        vars(spec)["unset"] = frozenset(values.get("unset", names)) - given_names
        return spec

    def __post_init__(self, unset: frozenset[str]) -> None:
        # Moved to the end: Training(**{**vars(run), ...}) gives every field.
        vars(self)["unset"] = vars(self).pop("unset")
