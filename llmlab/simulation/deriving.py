"""Derives a trace if none is stored yet: once for a model and the options of its run."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ..base.errors import NotAvailable
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..specs.check import check, has_formulas
from ..specs.model import ModelSpec
from ..specs.run import Run, Training
from ..traces.store import find, has_trace, keep
from ..traces.trace import Trace

_announced: set[str] = set()  # models
_without: set[tuple[str, Training, str]] = set()  # config, run and GPU of steps that have no trace


def trace_of(spec: ModelSpec, run: Run, gpu: GPU | str) -> Trace | None:
    """Return the trace of `run`, which is derived and stored if there is none yet. Return None if it cannot be derived,
    for example without torch."""
    if (isinstance(gpu, str) and gpu.lower() == "cpu") or not has_trace(run):
        return None
    gpu = find_gpu(gpu)
    run = check(spec, run, gpu)
    assert isinstance(run, Training)
    key = spec.config_json, run, gpu.name
    if (stored := find(spec, run, gpu)) or key in _without or not all(map(find_spec, ("torch", "transformers"))):
        return stored
    from .tracing import derived

    if spec.name not in _announced and sys.stderr.isatty():  # a notebook would keep the line as an output
        _announced.add(spec.name)
        note = "this takes seconds for each new set of options, and is kept"
        print(f"Deriving the formulas of {spec.name} from the code of transformers; {note}.", file=sys.stderr)
    try:
        trace = derived(spec, run, gpu)
    except NotAvailable as error:
        _without.add(key)
        if not has_formulas(spec, run):
            print(f"{error}. The estimate is that of a plain transformer.", file=sys.stderr)
        return None
    keep(spec, run, gpu, trace)
    return trace
