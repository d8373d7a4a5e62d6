"""Data sets and metrics that a script loads by name: rows from the user's files, and scores with a fixed value.

torchvision reads its data sets from files in its own folder, and normally accepts only published files, by their
checksums. Here, a few pictures of the user's in the same format are enough.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from ..base.errors import LabWarning, SpecError
from ..simulation.patching.imports import on_import

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
SPLITS = ("train", "validation", "test")
TORCHVISION = "torchvision.datasets.utils"
SCORE = 1.0  # like every number that the GPU would have computed


def read_data(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the files by data set name from texts NAME=FILE. Raises SpecError for any other text, and for a file that
    does not exist or has an unsupported type."""
    files = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise SpecError(f"--data {text}; give NAME=rows.jsonl, where NAME is what the script loads")
        if Path(path).suffix not in FORMATS or not os.path.isfile(path):
            raise SpecError(f"--data {text}: {path} is not a file of type {', '.join(FORMATS)}")
        files[name] = os.path.abspath(path)
    return files


@contextmanager
def data_by_name(files: Mapping[str, str]) -> Iterator[None]:
    """Let `datasets` load the rows of `files` by name, `evaluate` load any metric, and torchvision accept any file."""
    with ExitStack() as stack:
        hooks: dict[str, Callable[[], Any]] = {
            "datasets": lambda: stack.enter_context(_rows(files)),
            "evaluate": lambda: stack.enter_context(_metrics()),
            TORCHVISION: lambda: stack.enter_context(_any_checksum()),
        }
        stack.enter_context(on_import(hooks))
        yield


@contextmanager
def _rows(files: Mapping[str, str]) -> Iterator[None]:
    import datasets

    if not hasattr(datasets, "load_dataset"):  # a file of the script's own, datasets.py
        yield
        return
    real = datasets.load_dataset

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(real).bind(*args, **kwargs).arguments
        file = files.get(str(arguments["path"]))
        if file is None:
            return real(*args, **kwargs)
        splits = {*SPLITS, *re.findall(r"[a-z]\w*", str(arguments.get("split") or ""))}  # "train[:5%]+test"
        options = {name: arguments[name] for name in ("split", "streaming", "features") if name in arguments}
        return real(FORMATS[Path(file).suffix], data_files=dict.fromkeys(splits, file), **options)

    with mock.patch.object(datasets, "load_dataset", load_dataset):
        yield


@contextmanager
def _any_checksum() -> Iterator[None]:
    """Let torchvision accept any file in its data folder, with a warning if the checksum differs."""
    utils: Any = import_module(TORCHVISION)
    real = utils.check_md5

    def check_md5(fpath: str | Path, md5: str, **kwargs: Any) -> bool:
        if not real(fpath, md5, **kwargs):
            warnings.warn(
                f"{Path(fpath).parent}: its checksums are not those of the published files",
                LabWarning, stacklevel=2
            )
        return True

    with mock.patch.object(utils, "check_md5", check_md5):
        yield


@contextmanager
def _metrics() -> Iterator[None]:
    evaluate: Any = import_module("evaluate")
    if not hasattr(evaluate, "EvaluationModule"):  # a file of the script's own, evaluate.py
        yield
        return
    real = evaluate.load

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return real(path, *args, **kwargs)
        except (ConnectionError, FileNotFoundError):
            without = f"the metric {path} is not installed; its scores are set to {SCORE}"
            warnings.warn(without, LabWarning, stacklevel=2)
            return _Metric()

    with mock.patch.object(evaluate, "load", load):
        yield


class _Metric:
    """Replaces a metric of `evaluate` that is not installed."""

    def add(self, **kwargs: Any) -> None: ...

    def add_batch(self, **kwargs: Any) -> None: ...

    def compute(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return _Scores()


class _Scores(dict):
    """A dict that has any score that is looked up."""

    def __missing__(self, name: str) -> float:
        return SCORE
