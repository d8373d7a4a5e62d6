"""What no lookup finds: the records of every kind that could not be read."""

from __future__ import annotations

from pathlib import Path

from ..report import Report
from .chapters import ChapterRun
from .lookup import load_all
from .operators import sweep
from .published import Figure
from .store import Refused

BUILDS = {
    "reports": Report.from_dict, "chapters": ChapterRun.from_dict, "figures": Figure.from_dict, "operators": sweep,
}  # fmt: skip


def refused(folder: Path | str | None = None) -> list[Refused]:
    """Return the record files and records that were left out of every lookup, each with its reason."""
    # The first kind meets every unreadable file; the others add their own records only.
    found = [problem for kind, build in BUILDS.items() for problem in load_all(kind, build, folder)[1]]
    return list(dict.fromkeys(found))
