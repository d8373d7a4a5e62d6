"""The ledger: memory and time of each chapter's notebook on each machine, from the records of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..base.errors import SpecError
from ..base.units import show_bytes, show_seconds
from ..hardware.tables import read_table
from . import store
from .lookup import gpu_of, load

HEADER = ("chapter", "GPU", "peak allocated", "time", "dtype", "versions", "date")
NOT_MEASURED = "not measured yet"
VERSIONS = ("llmlab", "torch", "transformers", "driver")


@dataclass(frozen=True, kw_only=True)
class ChapterRun:
    """One execution of a chapter's notebook: `peak_allocated` in bytes (None where not known), `seconds` in all."""

    chapter: str
    gpu: str
    peak_allocated: int | None
    seconds: float
    dtype: str
    environment: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in ("chapter", "gpu", "dtype"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise SpecError(f"{name}={value!r} is not a name")
        if not _is_number(self.seconds) or self.seconds < 0:
            raise SpecError(f"seconds={self.seconds!r} is not a number >= 0")
        peak = self.peak_allocated
        if peak is not None and (isinstance(peak, bool) or not isinstance(peak, int) or peak < 0):
            raise SpecError(f"peak_allocated={peak!r} is not a whole number of bytes >= 0")
        if not self.environment.get("date"):
            raise SpecError(f"the run of {self.chapter} needs environment with at least its date")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ChapterRun:
        """Return the run that a record describes; unknown or missing fields raise SpecError."""
        known = {f.name for f in fields(cls)}
        if set(data) != known:
            raise SpecError(f"a chapter's run has the fields {', '.join(sorted(known))}; not {', '.join(sorted(data))}")
        return cls(**data)


@dataclass(frozen=True)
class LedgerRow:
    """One line of the ledger; `run` is None if the chapter has no record."""

    chapter: str
    run: ChapterRun | None

    def cells(self) -> tuple[str, ...]:
        """Return the line as text, one cell for each name of `HEADER`."""
        if self.run is None:
            return (self.chapter, NOT_MEASURED, *[""] * (len(HEADER) - 2))
        environment = self.run.environment
        versions = ", ".join(f"{name} {environment[name]}" for name in VERSIONS if name in environment)
        sizes = (show_bytes(self.run.peak_allocated), show_seconds(self.run.seconds))
        return (self.chapter, self.run.gpu, *sizes, self.run.dtype, versions, environment["date"])


def ledger(chapters: Iterable[str] | None = None, folder: Path | str | None = None) -> list[LedgerRow]:
    """Return one row per chapter and GPU, newest first, and one row for each chapter without a record.

    `chapters` sets the order. By default, the chapters of hardware/chapters.toml come first, then others with records.
    """
    runs = load("chapters", ChapterRun.from_dict, folder)
    if chapters is None:
        chapters = dict.fromkeys([*_chapters(), *(run.chapter for run in runs)])
    rows = []
    for chapter in chapters:
        of_chapter = [run for run in runs if run.chapter == chapter]
        of_chapter.sort(key=lambda run: run.environment["date"], reverse=True)
        rows += [LedgerRow(chapter, run) for run in of_chapter] or [LedgerRow(chapter, None)]
    return rows


def record_chapter(
    chapter: str,
    peak_allocated: int | None,
    seconds: float,
    dtype: str,
    *,
    gpu: str | None = None,
    environment: Mapping[str, str] | None = None,
    out: Path | str | None = None,
) -> Path:
    """Record one execution of a chapter's notebook and return the file; a newer run on the same GPU replaces it.

    `peak_allocated` is in bytes, `seconds` is for the whole notebook, `dtype` is the one it computed in. `gpu` and
    `environment` describe this machine by default; if LLMLAB_AS is set, `gpu` is named as pretended. `out` is the
    folder of records. Its default is the folder of the package in a checkout, and the user's folder otherwise.
    """
    from ..hardware.this_machine import environment as of_this_machine
    from ..hardware.this_machine import host

    gpu = gpu_of(host()) if gpu is None else gpu
    environment = dict(of_this_machine() if environment is None else environment)
    run = ChapterRun(
        chapter=chapter, gpu=gpu, peak_allocated=peak_allocated, seconds=seconds, dtype=dtype, environment=environment
    )
    path = Path(out or store.output_folder()) / store.slug(gpu) / "chapters.json"
    store.merge(path, "chapters", [asdict(run)], key=lambda data: (data["chapter"], data["gpu"]))
    return path


def _chapters() -> list[str]:
    return [entry["name"] for entry in read_table("chapters.toml")["chapter"]]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
