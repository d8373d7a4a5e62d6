"""Measured results as JSON, ours and published, and how they are looked up."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .lookup import held_out, records

if TYPE_CHECKING:
    from .chapters import ChapterRun, LedgerRow, ledger, record_chapter
    from .operators import OperatorRecord, operator_records
    from .plan import PLAN, Item
    from .published import Figure, figure, figures
    from .recorder import Recording, record
    from .refusals import refused
    from .store import RecordWarning, Refused

# Loaded on first use: `import llmlab` needs `records` alone.
_HOMES = {
    "chapters": ("ChapterRun", "LedgerRow", "ledger", "record_chapter"),
    "published": ("Figure", "figure", "figures"),
    "operators": ("OperatorRecord", "operator_records"),
    "plan": ("PLAN", "Item"),
    "recorder": ("Recording", "record"),
    "refusals": ("refused",),
    "store": ("RecordWarning", "Refused"),
}
__all__ = [
    "PLAN",
    "ChapterRun",
    "Figure",
    "Item",
    "LedgerRow",
    "OperatorRecord",
    "RecordWarning",
    "Recording",
    "Refused",
    "figure",
    "figures",
    "held_out",
    "ledger",
    "operator_records",
    "record",
    "record_chapter",
    "records",
    "refused",
]


if not TYPE_CHECKING:  # checkers read the imports above, and find a misspelt name

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{home}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
