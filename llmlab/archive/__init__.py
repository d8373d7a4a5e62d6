"""Measured results as JSON, ours and published, and how they are looked up."""

from .chapters import ChapterRun, LedgerRow, ledger, record_chapter
from .lookup import held_out, records
from .operators import OperatorRecord, operator_records
from .plan import PLAN, Item
from .published import Figure, figure, figures
from .store import RecordWarning

__all__ = [
    "PLAN",
    "ChapterRun",
    "Figure",
    "Item",
    "LedgerRow",
    "OperatorRecord",
    "RecordWarning",
    "figure",
    "figures",
    "held_out",
    "ledger",
    "operator_records",
    "record_chapter",
    "records",
]
