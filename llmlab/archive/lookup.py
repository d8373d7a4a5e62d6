"""Finding records: reports measured before, ours and published, by model, run and GPU."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Set
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..base.errors import SpecError, UnknownName, unknown_name
from ..base.terms import SOURCES
from ..hardware import pretend
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.this_machine import Host
from ..report import Report
from ..specs.model import ModelLike, models
from ..specs.model import model as find_model
from ..specs.run import Run
from . import store
from .store import Record, RecordWarning, Refused

CPU = "cpu"
HELD_OUT = "held out until"  # in the environment of a record: the day it was added


def records(
    model: ModelLike | None = None,
    run: Run | None = None,
    gpu: GPU | str | None = None,
    source: str | None = None,
    folder: Path | str | None = None,
) -> list[Report]:
    """Return the recorded reports that agree with everything given; see `llmlab.records`."""
    if source is not None and source not in SOURCES:
        raise SpecError(f"source={source!r} is not one of {', '.join(SOURCES)}")
    if model is not None and (wanted_model := model_name(model)) is None:
        return []
    loaded = load("reports", Report.from_dict, folder)
    if isinstance(model, str) and not os.path.exists(os.path.expanduser(model)):
        known = [*models(), *{report.model for report in loaded}]
        if wanted_model not in known:
            short = [name.rpartition("/")[2] for name in known]
            raise unknown_name("model", model, [*known, *short], "See `llmlab models` and `llmlab records`.")
    wanted_gpu = None if gpu is None else gpu_name(gpu, {recorded_gpu(report) for report in loaded})
    matches = [
        report
        for report in loaded
        if (model is None or _preset_name(report.model) == wanted_model)
        and (run is None or report.run == run)
        and (wanted_gpu is None or recorded_gpu(report) == wanted_gpu)
        and (source is None or report.source == source)
    ]
    return sorted(matches, key=lambda report: report.environment.get("date", ""), reverse=True)  # stable: as published


def held_out(report: Report) -> bool:
    """Return whether `report` was unseen: the formulas and the simulator were written without knowing it."""
    return HELD_OUT in report.environment


def load(kind: str, build: Callable[[dict[str, Any]], Record], folder: Path | str | None = None) -> list[Record]:
    """Return every record of `kind`, warning of each that was refused; `folder` None: the package's and the user's."""
    result: list[Record] = []
    for place in store.folders() if folder is None else (Path(folder),):
        stamp = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in store.files(place))
        built, refusals = _read(kind, build, place, stamp)
        result += built
        for refusal in refusals:
            warnings.warn(str(refusal), RecordWarning, stacklevel=_callers())
    return result


def _callers() -> int:
    """Return the `stacklevel` of the line that called this package, for a warning from the function that asks."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and str(frame.f_globals["__name__"]).partition(".")[0] == __package__.partition(".")[0]:
        level, frame = level + 1, frame.f_back
    return level


@lru_cache(maxsize=32)
def _read(
    kind: str, build: Callable[[dict[str, Any]], Record], place: Path, stamp: tuple
) -> tuple[tuple[Record, ...], tuple[Refused, ...]]:
    # `stamp`, the files' times and sizes, is the cache's key: a changed file is read again.
    built, refusals = store.read(kind, build, place)
    return tuple(built), tuple(refusals)


@lru_cache(maxsize=512)
def _preset_name(name: str) -> str:
    try:
        preset = find_model(name).name
    except (UnknownName, SpecError):
        return name  # not a preset: the name itself is compared
    return preset if preset in models() else name


def model_name(model: ModelLike) -> str | None:
    """Return the name by which models are compared: the preset's where there is one, else the model's own.

    None for a config without a name: no record can be known to be of that model.
    """
    if isinstance(model, str) and not os.path.exists(os.path.expanduser(model)):
        return _preset_name(model)
    name = find_model(model).name
    return None if name.startswith("custom-") or name.endswith("(changed)") else name


@lru_cache(maxsize=512)
def _gpu_name(name: str) -> str:
    if name.lower() == CPU:
        return CPU
    try:
        return find_gpu(name).name
    except UnknownName:
        return name  # a GPU that is not in the table keeps the name its driver gives it


def recorded_gpu(report: Report) -> str:
    """Return the name of a report's GPU; a report of a CPU names none, and is of "cpu"."""
    return CPU if report.gpu is None else _gpu_name(report.gpu)


def gpu_of(here: Host) -> str:
    """Return the name that records of this machine carry: the table's, else what torch calls the device, or "cpu"."""
    if here.device == "cpu":
        return CPU
    pretending = here.gpu is not None and here.gpu == pretend.pretended()
    return here.gpu.name if here.gpu and not pretending else here.name


def gpu_name(gpu: GPU | str, recorded: Set[str] = frozenset()) -> str:
    """Return the name by which GPUs are compared: the table's, "cpu", or one of those `recorded`; else UnknownName."""
    if isinstance(gpu, GPU):
        return gpu.name
    return _gpu_name(gpu) if gpu in recorded or gpu.lower() == CPU else find_gpu(gpu).name
