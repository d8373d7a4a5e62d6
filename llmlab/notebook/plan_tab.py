"""The calculator's third answer: a plan, by estimates alone. `lab.plan` simulates each run that it shows, which needs
torch; a browser has none, so the page shows what the estimates find, and the lines that confirm it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..base.errors import SpecError
from ..planning.confirm import NotSimulated
from ..planning.plan import plan
from ..planning.result import Plan
from ..planning.space import ALLOWED, GOALS, METHODS
from ..specs.help import HELP
from ..specs.run import Training
from .fields import model_of, state_of, whole

UNCONFIRMED = "Estimates that are sure to fit; no simulation confirmed them: `llmlab plan` simulates each."
METHOD_HELP = "What is trained: all weights, or LoRA adapters, on half-precision weights or (qlora) on NF4 ones."
DEFAULTS = {"global_batch": "64", "seq_len": "2048", "method": METHODS[0], "goal": GOALS[0], "tokens": "none"}


def plan_fields() -> list[dict[str, Any]]:
    """Return the controls of a plan, beside model, GPU and number of GPUs."""
    asked: list[dict[str, Any]] = [
        {"name": "global_batch", "kind": "number", "help": "Sequences per update, over all GPUs."},
        {"name": "seq_len", "kind": "number", "help": HELP["seq_len"]},
        {"name": "method", "kind": "choice", "options": [*METHODS], "help": METHOD_HELP},
        {"name": "goal", "kind": "choice", "options": [*GOALS], "help": "What the best run has least of."},
        {"name": "tokens", "kind": "number", "help": "How many are to be trained on; none: it does not matter."},
    ]
    vary = "The search may choose it too: what is trained, or what must be installed, is then another."
    flags = [{"name": f"vary_{name}", "kind": "flag", "default": "no", "help": vary} for name in ALLOWED]
    return [*({**field, "default": DEFAULTS[field["name"]]} for field in asked), *flags]


def planned(state: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page shows of a plan; raises SpecError and UnknownName for what makes none."""
    asked = {**DEFAULTS, **state}
    source, called = model_of(asked["model"])
    if (ranks := whole("gpus", asked["gpus"])) < 1:
        raise SpecError(f"gpus={ranks} is too small; give a whole number >= 1")
    gpus, batch = f"{ranks}x{asked['gpu']}", whole("global_batch", asked["global_batch"])
    tokens = Training(seq_len=whole("seq_len", asked["seq_len"])).seq_len  # which checks it
    options: dict[str, Any] = {"fixed": {"seq_len": tokens}}
    for name in ("method", "goal"):
        if asked[name] != DEFAULTS[name]:
            options[name] = asked[name]
    if allowed := [name for name in ALLOWED if asked.get(f"vary_{name}") == "yes"]:
        options["allow"] = allowed
    if asked["tokens"] != "none":
        options["tokens"] = whole("tokens", asked["tokens"])
    result = plan(source, gpus, batch, **options, executor=NotSimulated(UNCONFIRMED))
    return {
        "outcome": "fits" if result else "unknown",
        "headline": _headline(result),
        "plan": _rows(result),
        "python": _python(called, gpus, batch, options),
        "cli": _command(called, gpus, batch, options),
        "configs": {},
        "notes": [*map(str, result.nearest)],
        "report": json.loads(json.dumps(result.to_dict(), default=dict)),
    }


def _headline(result: Plan) -> str:
    if not result:
        return f"No run on {result.gpus} is sure to fit. llmlab plan simulates those that are too close to tell."
    more = f", and {len(result) - 1} others" if len(result) > 1 else ""
    return f"The {result.goal} of {result.tried:,} runs that were estimated on {result.gpus}{more}."


def _rows(result: Plan) -> dict[str, Any]:
    """Return the plan's own table, each row with the state of the form that shows that run."""
    table = result.table()
    sets = [{"kind": "training", **state_of(candidate.run)} for candidate in result]
    rows = [{"cells": list(cells), "set": state} for cells, state in zip(table.rows, sets, strict=bool(sets))]
    return {"caption": table.title, "header": list(table.header), "rows": rows, "footer": table.footer}


def _python(called: str, gpus: str, batch: int, options: Mapping[str, Any]) -> str:
    words = "".join(f", {name}={value!r}" for name, value in options.items())
    call = f'print(lab.plan("{called}", "{gpus}", {batch}{words}))'
    return f'import llmlab as lab\n\nif __name__ == "__main__":  # it starts processes\n    {call}'


def _command(called: str, gpus: str, batch: int, options: Mapping[str, Any]) -> str:
    words = [f"llmlab plan {called} --gpus {gpus} --global-batch {batch} --fixed seq_len={options['fixed']['seq_len']}"]
    words += [f"--{name} {options[name]}" for name in ("method", "goal", "tokens") if name in options]
    words += [f"--allow {name}" for name in options.get("allow", ())]
    return " ".join(words)
