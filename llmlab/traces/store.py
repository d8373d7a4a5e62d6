"""Stores traces in this process, and in the user's cache under a hash of everything on which a trace depends."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.files import write_whole
from ..base.version import __version__
from ..hardware.gpu import GPU
from ..specs.model import ModelSpec
from ..specs.run import Run, Training, stack_of
from .points import range_of
from .trace import Trace

if TYPE_CHECKING:
    from typing import TypeGuard

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
_kept: dict[str, Trace] = {}


def has_trace(run: Run) -> TypeGuard[Training]:
    """Whether a step of `run` can have a trace: it trains a model of transformers eagerly, and without offloading.

    A rank of a pipeline has few layers, and a rank of ZeRO-1 has the states of parameters that are distributed by size.
    Neither is linear in the model's depth.
    """
    if not isinstance(run, Training) or stack_of(run).own_program or run.pp > 1 or run.zero == 1:
        return False
    return not (run.offload or run.compile)  # fp8 is compiled


def find(spec: ModelSpec, run: Training, gpu: GPU) -> Trace | None:
    """Return the stored trace of `run` if there is one; a file that cannot be read counts as none."""
    for fixed in range(3):
        key = _key(spec, run, gpu, fixed)
        if key not in _kept:
            try:
                _kept[key] = Trace.from_dict(json.loads(_file(key).read_text(encoding="utf-8")))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
                continue
            except ModuleNotFoundError:  # no platformdirs, as in a browser, which stores no traces
                return None
        return _kept[key]
    return None


def keep(spec: ModelSpec, run: Training, gpu: GPU, trace: Trace) -> None:
    """Store `trace` for every run in its range; if the cache cannot be written, only in this process."""
    key = _key(spec, run, gpu, trace.fixed)
    _kept[key] = trace
    with suppress(OSError):  # with a read-only home, the next process derives the trace again
        write_whole(_file(key), json.dumps(trace.to_dict(), separators=(",", ":")))


def _key(spec: ModelSpec, run: Training, gpu: GPU, fixed: int) -> str:
    options = {name: value for name, value in run.to_dict().items() if name not in ("micro_batch", "seq_len")}
    where = range_of(run.micro_batch, run.seq_len, fixed)
    data = [__version__, _versions(), json.loads(spec.config_json), options, where, gpu.name]
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:24]


@cache
def _versions() -> list[str]:
    traces = []
    for library in LIBRARIES:
        try:
            traces.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            traces.append(library)
    return traces


def _file(key: str) -> Path:
    from platformdirs import user_cache_dir

    return Path(os.environ.get("LLMLAB_CACHE") or user_cache_dir("llmlab")) / "traces" / f"{key}.json"
