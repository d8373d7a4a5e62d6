"""Will it fit? The form and its answers, as plain data, for the page in the browser and for the widget in a notebook.

Both show `calculator.mjs`, which computes nothing: it sends the form's state, text by field name, and draws what
`answer` returns. In the browser this module runs in Pyodide, so it needs the standard library and `llmlab` alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..base.errors import NotAvailable, SpecError, UnknownName
from ..base.terms import PARTS
from ..base.units import GiB, show_bytes, show_count, show_seconds
from ..base.version import BOOK
from ..formulas.report import assessed
from ..formulas.verdict import Verdict
from ..hardware.gpu import GPU, gpus
from ..hardware.gpu import gpu as find_gpu
from ..planning.levers import cost, fix
from ..report import Report
from ..specs.model import model as find_model
from ..specs.model import models
from ..specs.run import LoRA, Training
from ..specs.stacks import STACKS
from .fields import fields_of, model_of, run_of, state_of
from .plan_tab import plan_fields, planned
from .serving_tab import serving_answer, serving_fields

KINDS = ("training", "serving", "planning")
DEFAULTS = {"kind": "training", "model": "meta-llama/Llama-3.1-8B", "gpu": "RTX-4090", "gpus": "1"}
# The state in which the page opens: a full fine-tune as most people start one, on the largest GPU that many have. It
# does not fit, and the levers say what would.
FIRST = {"precision": "bf16", "seq_len": "2048", "checkpointing": "full"}
OUTCOMES = {"fits": "fits", "out of memory": "out of memory", "unknown": "too close to tell"}
LABELS = {
    "gpu": "GPU", "gpus": "GPUs", "seq_len": "sequence length", "lora": "LoRA rank", "lora_targets": "LoRA targets",
    "zero": "ZeRO stage", "tp": "tensor parallel", "pp": "pipeline stages", "cp": "context parallel",
    "ep": "expert parallel", "dp_replicate": "HSDP copies", "prompt_len": "prompt length", "kv": "KV cache",
    "output_len": "answer length", "dp_attention": "copies of attention",
    "compile": "torch.compile",
}  # fmt: skip


def form() -> dict[str, Any]:
    """Return the form: the models, the GPUs, and for training, serving and planning each field."""
    return {
        "defaults": {**DEFAULTS, **FIRST},
        "models": [{"name": name, "says": f"{show_count(find_model(name).parameters)} params"} for name in models()],
        "gpus": [{"name": gpu.name, "says": f"{gpu.memory / GiB:.0f} GiB"} for gpu in gpus()],
        "parts": list(PARTS),
        "book": BOOK,
        "labels": LABELS,
        "training": fields_of(Training),
        "serving": serving_fields(),
        "planning": plan_fields(),
    }


def answer(state: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page shows for `state`, the form's values by name; what is missing has its default.

    A state that makes no run is {"error": a sentence}.
    """
    try:
        known = {**DEFAULTS, **state}
        if known["kind"] == "planning":
            return planned(known)
        if known["kind"] == "serving":
            return serving_answer(known)
        source, called = model_of(known["model"])
        gpu, run = find_gpu(known["gpu"]), run_of(known)
        report, fit = assessed(source, run, gpu)
        return {
            **_figures(report, fit, gpu),
            "python": python_line(called, run, gpu),
            "cli": command_line(called, run, gpu),
            "configs": _configs(run),
            "levers": _levers(source, run, gpu),
            "report": report.to_dict(),
        }
    except (SpecError, UnknownName, NotAvailable) as error:
        return {"error": str(error)}


def _figures(report: Report, fit: Verdict, gpu: GPU) -> dict[str, Any]:
    between = (report.step_seconds_low, report.step_seconds_high)
    return {
        "outcome": report.outcome,
        "headline": _headline(report, fit, gpu),
        "peak": report.peak_allocated,
        "capacity": gpu.memory,
        "least": fit.least,
        "most": fit.most,
        "parts": [[part, report.parts[part], show_bytes(report.parts[part])] for part in PARTS if part in report.parts],
        "peak_shown": show_bytes(report.peak_allocated),
        "seconds": report.step_seconds,
        "figures": [
            ["time per step", show_seconds(report.step_seconds),
             f"80 % interval: {show_seconds(between[0])} to {show_seconds(between[1])}" if all(between) else ""],
            ["tokens per second", f"{report.tokens_per_second:,.0f}" if report.tokens_per_second else "–", ""],
            ["MFU", f"{report.mfu:.1%}" if report.mfu else "–", ""],
            ["cost of a billion tokens", *_cost(report, gpu)],
        ],
        "notes": list(report.notes),
    }  # fmt: skip


def _levers(source: Any, run: Training, gpu: GPU) -> list[dict[str, Any]]:
    """Return what would make the run smaller, and the form's fields that say it."""
    levers = fix(source, run, gpu)
    return [
        {
            "name": lever.name + ("" if lever.same_result else " (another result)"), "chapter": lever.chapter,
            "saves": show_bytes(lever.saves),
            "costs": f"{cost(lever, levers.report)}; then: {OUTCOMES[lever.report.outcome]}",
            "set": state_of(lever.run) if isinstance(lever.run, Training) else {},
        }
        for lever in levers.levers
    ]  # fmt: skip


def _headline(report: Report, fit: Verdict, gpu: GPU) -> str:
    room = show_bytes(gpu.memory)
    if report.outcome == "fits":
        return f"Fits: at most {show_bytes(fit.most)} of the {room} of each {gpu.name}."
    if report.outcome == "out of memory":
        return f"Does not fit: it needs at least {show_bytes(report.needed)}, and {gpu.name} has {room}."
    return f"Too close to tell: {show_bytes(fit.least)} to {show_bytes(fit.most)} of {room}. llmlab simulate decides."


def _cost(report: Report, gpu: GPU) -> tuple[str, str]:
    if not report.tokens_per_second or gpu.usd_per_hour is None:
        return "–", "" if report.tokens_per_second is None else f"no rental price of {gpu.name} is in the table"
    dollars = gpu.usd_per_hour * report.run.world_size / 3600 / report.tokens_per_second * 1e9
    price = next(price for price in gpu.prices if price.usd == gpu.usd_per_hour)
    return f"${dollars:,.0f}", f"at ${price.usd:.2f} per GPU and hour ({price.kind}, {price.date})"


def python_line(called: str, run: Training, gpu: GPU) -> str:
    """Return the Python that gives this estimate; `called` is the model's name, or a config.json's."""
    ours = "|".join(kind.__name__ for kind in (Training, LoRA, *STACKS.values()))
    words = re.sub(rf"\b({ours})\(", r"lab.\1(", repr(run))
    return f'import llmlab as lab\n\nrun = {words}\nprint(lab.estimate("{called}", run, "{gpu.name}"))'


def command_line(called: str, run: Training, gpu: GPU) -> str:
    """Return the command that gives this estimate."""
    words = ["llmlab estimate", called, f"--gpu {gpu.name}"]
    # The command line's defaults of these differ from Python's.
    usual = {name: value for name, value in run.values().items() if name == "precision"}
    for name, value in {**usual, **run.differences()}.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, LoRA):
            words.append(f"--lora {value.rank} --lora-targets {','.join(value.targets)}")
        elif name == "stack":  # the form has names alone: all options are the stack's own
            words.append(f"{flag} {value.name}")
        elif value is False:
            words.append(f"--no-{flag.removeprefix('--')}")
        else:
            words.append(flag if value is True else f"{flag} {'none' if value is None else value}")
    return " ".join(words)


def _configs(run: Training) -> dict[str, str]:
    """Return the files of engines that can say this run, by name: those that cannot are left out."""
    files = {}
    for name, made in (("ds_config.json", run.to_deepspeed), ("accelerate.json", run.to_accelerate)):
        try:
            files[name] = json.dumps(made(), indent=2) + "\n"
        except SpecError:
            continue
    return files
