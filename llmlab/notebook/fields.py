"""The calculator's fields: text by name, as the form holds it, and the model and the run that it describes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..base.errors import SpecError
from ..specs.help import HELP
from ..specs.model import model as find_model
from ..specs.model import models
from ..specs.run import LoRA, Training, stack_of
from ..specs.stacks import STACKS, TRANSFORMERS

# The first is the number of GPUs'; the adapters' memory does not depend on theirs; the others are not shown.
DERIVED = {"dp", "lora_alpha", "lora_dropout", "images", "pixels", "num_labels", "method", "reference", "teacher",
           "completion_len", "mean_completion_len", "generations", "gpu_memory_utilization",
           "expert_imbalance"}  # fmt: skip
CONFIG = "config.json"  # what a pasted config is called in the lines to copy
HUB = re.compile(r"https?://(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+)")


def fields_of(owner: type[Training]) -> list[dict[str, Any]]:
    """Return the fields of a spec as controls: a choice, a number, a flag or a text."""
    made: list[dict[str, Any]] = []
    for name, hint in get_type_hints(owner).items():
        if name == "lora":
            made.append({"name": "lora", "kind": "number", "default": "none", "help": HELP["lora"]})
            targets = ",".join(LoRA.targets)
            made.append({"name": "lora_targets", "kind": "text", "default": targets, "help": HELP["lora_targets"]})
        elif name == "stack":
            names = [TRANSFORMERS, *STACKS]
            made.append({"name": name, "kind": "choice", "default": TRANSFORMERS, "options": names, "help": HELP[name]})
        elif name in HELP and name not in DERIVED:
            made.append({"name": name, "help": HELP[name], **_control(hint, getattr(owner, name))})
    return made


def _control(hint: Any, default: Any) -> dict[str, Any]:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    literal = hint if get_origin(hint) is Literal else next((k for k in kinds if get_origin(k) is Literal), None)
    if hint is bool:
        return {"kind": "flag", "default": text_of(default)}
    if literal is None:
        return {"kind": "number", "default": str(default)}
    optional = ["none"] if NoneType in get_args(hint) else []
    return {"kind": "choice", "default": default or "none", "options": [*optional, *get_args(literal)]}


def run_of(state: Mapping[str, str]) -> Training:
    """Return the run that the form's values describe. Data-parallel ranks are the GPUs that tp, pp and cp leave."""
    if state.get("kind") != "training":
        raise SpecError(f"kind={state.get('kind')!r} is not one of training, serving, planning")
    values = {
        name: _value(name, state[name], hint, getattr(Training, name))
        for name, hint in get_type_hints(Training).items()
        if name in state and name in HELP and name not in DERIVED
    }
    if (ranks := whole("gpus", state["gpus"])) < 1:
        raise SpecError(f"gpus={ranks} is too small; give a whole number >= 1")
    if (rank := state.get("lora", "none")) != "none":
        targets = state.get("lora_targets", ",".join(LoRA.targets))
        values["lora"] = LoRA(whole("lora", rank), tuple(name.strip() for name in targets.split(",") if name.strip()))
    sharded = 1
    for name in ("tp", "pp", "cp"):
        sharded *= values.get(name, 1)
    if sharded < 1 or ranks % sharded:
        raise SpecError(f"{ranks} GPUs cannot be divided into groups of tp × pp × cp = {sharded}; change one of them")
    return Training(**values, dp=ranks // sharded)


def _value(name: str, text: str, hint: Any, default: Any) -> Any:
    if hint is bool:
        return text == "yes"
    if isinstance(default, int):
        return whole(name, text)
    return None if text == "none" else text


def whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"{name}={text[:40]!r} is not a whole number") from None


def model_of(text: str) -> tuple[Any, str]:
    """Return the model that a preset's name or a pasted config.json names, and what the lines to copy call it."""
    text = text.strip()
    if text.startswith("{"):
        try:
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"the pasted config.json is not JSON: {error}") from None
        return config, CONFIG
    if hub := HUB.match(text):
        address = f"https://huggingface.co/{hub[1]}/resolve/main/config.json"
        if hub[1] not in models():
            raise SpecError(f"this page fetches nothing: open {address} and paste what it says here")
        text = hub[1]
    if text not in models():
        find_model(text if "/" not in text else text.rpartition("/")[2])  # a name without its organisation
    return text, text


def state_of(run: Training) -> dict[str, str]:
    """Return the form's values that describe `run`: `run_of` gives it back."""
    state = {"gpus": str(run.world_size)}
    for f in fields(run):
        value = getattr(run, f.name)
        if f.name in DERIVED:
            continue
        if f.name == "lora":
            state["lora"] = str(value.rank) if value else "none"
            if value:
                state["lora_targets"] = ",".join(value.targets)
        else:
            state[f.name] = stack_of(run).name if f.name == "stack" else text_of(value)
    return state


def text_of(value: Any) -> str:
    """Return a field's value as the form writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
