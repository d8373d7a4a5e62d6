"""The calculator's second answer: a model served by an engine, as `lab.serve` predicts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from ..base.errors import SpecError
from ..base.units import show_bytes, show_seconds
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..serving.report import ServingReport, served
from ..serving.service import CHOICES, HELP, Service
from ..specs.model import model as find_model
from .fields import model_of, text_of, whole

# The command line's option and the form's field is the number of GPUs.
DERIVED = ("tp",)
PARTS = {"weights": "weights", "activations": "activations", "kv_cache": "cache", "workspace": "graphs",
         "other": "outside"}  # fmt: skip # the form's parts, and Memory's fields

OPTIONS = CHOICES | {"draft": ("none", "eagle3", "mtp")}


def serving_fields() -> list[dict[str, Any]]:
    """Return the fields of a Service as controls: a choice, a flag or a number."""
    made = []
    for name, hint in get_type_hints(Service).items():
        if name not in DERIVED:
            options, number = OPTIONS.get(name), {"kind": "flag" if hint is bool else "number"}
            kind = {"kind": "choice", "options": list(options)} if options else number
            made.append({"name": name, "default": text_of(getattr(Service, name)), "help": HELP[name], **kind})
    return made


def service_of(state: Mapping[str, str]) -> Service:
    """Return the service that the form's values describe."""
    hints = get_type_hints(Service).items()
    values = {name: _value(name, state[name], hint) for name, hint in hints if name in state and name not in DERIVED}
    gpus, stages = whole("gpus", state["gpus"]), values.get("pp", 1)
    if stages < 1 or gpus % stages:
        raise SpecError(f"pp={stages}: give a number of stages that divides the {gpus} GPUs")
    return Service(**values, tp=gpus // stages)


def _value(name: str, text: str, hint: Any) -> Any:
    kinds = (hint, *get_args(hint))
    if text == "none" or hint is bool:
        return None if text == "none" else text == "yes"
    if float not in kinds:
        return whole(name, text) if int in kinds else text
    try:
        return float(text)
    except ValueError:
        raise SpecError(f"{name}={text[:40]!r} is not a number") from None


def serving_answer(state: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page shows of a served model. Raises SpecError for what cannot be served."""
    source, called = model_of(state["model"])
    gpu, service = find_gpu(state["gpu"]), service_of(state)
    report = served(find_model(source), service, gpu)
    memory = report.memory
    sizes = {part: max(0, getattr(memory, field)) for part, field in PARTS.items()}
    peak = sum(sizes.values())
    return {
        "outcome": report.outcome,
        "headline": _headline(report),
        "peak": peak,
        "capacity": gpu.memory,
        "least": peak,
        "most": peak,
        "parts": [[part, size, show_bytes(size)] for part, size in sizes.items()],
        "peak_shown": show_bytes(peak),
        "seconds": None,
        "figures": _figures(report),
        "notes": list(report.notes),
        "python": _python(called, service, gpu),
        "cli": _command(called, service, gpu),
        "configs": {},
        "levers": [],
        "report": report.to_dict(),
    }


def _headline(report: ServingReport) -> str:
    memory = report.memory
    if report.latency is None:
        missing = show_bytes(memory.missing)
        return f"Does not fit: {missing} more are needed on each {report.gpu} for one request."
    return f"Fits: the cache holds {memory.requests:,} requests, {memory.tokens:,} tokens."


def _figures(report: ServingReport) -> list[list[str]]:
    times = report.latency
    if times is None:
        return []
    rows, (tpot, ttft) = [], report.intervals
    for name, value, far, (low, high) in (
        ("time to first token", times.ttft, times.ttft_p99, ttft),
        ("time per output token", times.tpot, times.tpot_p99, tpot),
    ):
        between = f"{show_seconds(low * value)} to {show_seconds(high * value)}"
        rows.append([name, show_seconds(value), f"80 % interval: {between}; 99th percentile {show_seconds(far)}"])
    low, high = (factor * times.tokens_per_second for factor in report.rate_interval)
    about = f"80 % interval: {low:,.0f} to {high:,.0f}; {report.tokens_per_second_per_gpu:,.0f} per GPU"
    rows.append(["output tokens per second", f"{times.tokens_per_second:,.0f}", about])
    if report.usd_per_million_output is not None:
        rows.append(["a million tokens", f"${report.usd_per_million_output:.2f}",
                     f"of answers; ${report.usd_per_million_input:.3f} of prompts"])  # fmt: skip
    return rows


def _given(service: Service) -> dict[str, Any]:
    return {
        field.name: getattr(service, field.name)
        for field in fields(Service)
        if getattr(service, field.name) != field.default
    }


def _python(called: str, service: Service, gpu: GPU) -> str:
    words = ", ".join(f"{name}={value!r}" for name, value in _given(service).items())
    call = f'print(lab.serve("{called}", service, "{gpu.name}"))'
    return f"import llmlab as lab\n\nservice = lab.Service({words})\n{call}"


def _command(called: str, service: Service, gpu: GPU) -> str:
    words = [f"llmlab serve {called} --gpu {gpu.name}"]
    for name, value in _given(service).items():
        word = name.replace("_", "-")
        words.append(f"--{'' if value else 'no-'}{word}" if isinstance(value, bool) else f"--{word} {value}")
    return " ".join(words)
