"""The stacks whose code can train: each stack's options, by its own names, and the fields of a run that it sets.

>>> from llmlab.specs.run import Training
>>> Training(dp=8, stack="torchtitan:ac=full")
Training(precision='mixed-bf16', checkpointing='full', zero=3, dp=8, stack=Torchtitan(ac='full'))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...base.errors import SpecError, unknown_name
from .deepspeed import DeepSpeed
from .litgpt import LitGPT
from .megatron import Megatron
from .nanotron import Nanotron
from .options import StackOptions
from .torchtitan import Torchtitan
from .torchtune import Torchtune
from .transformers import Transformers

__all__ = ["STACKS", "TRANSFORMERS", "DeepSpeed", "LitGPT", "Megatron", "Nanotron", "StackOptions", "Torchtitan",
           "Torchtune", "Transformers", "check_stack", "options_of", "resolved", "stack_from_dict"]  # fmt: skip

TRANSFORMERS = Transformers.name
STACKS: dict[str, type[StackOptions]] = {
    stack.name: stack for stack in (Torchtitan, Megatron, Torchtune, DeepSpeed, LitGPT, Nanotron)
}
_TRANSFORMERS = Transformers()


def resolved(stack: Any) -> StackOptions | str:
    """Return the options for a text ("torchtitan", "torchtitan:ac=full,every=2") or a `to_dict()`; options, and the
    name "transformers", are returned as they are. Raises SpecError for an unknown stack or option."""
    if isinstance(stack, StackOptions) or stack == TRANSFORMERS:
        return stack
    if isinstance(stack, Mapping):  # from to_dict, or from an engine's settings
        return stack_from_dict(stack)
    names = [TRANSFORMERS, *STACKS]
    if not isinstance(stack, str):
        raise SpecError(f"stack={stack!r} is a {type(stack).__name__}; give a name ({', '.join(names)}) or the options "
                        "of a stack")  # fmt: skip
    name, _, options = stack.partition(":")
    if name not in STACKS:
        raise unknown_name("stack", name, names, f"It is one of {', '.join(names)}.")
    return STACKS[name](**_options(stack, options.split(",") if options else ()))


def options_of(stack: StackOptions | str) -> StackOptions:
    """Return a resolved stack as options, which have all facts about its code; "transformers" becomes an object."""
    return stack if isinstance(stack, StackOptions) else _TRANSFORMERS


def _options(stack: str, texts: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        option, equals, value = text.strip().partition("=")
        if not equals:
            raise SpecError(f"stack={stack!r}: {text!r} is not option=value; give, for example, torchtitan:ac=full")
        words: dict[str, Any] = {"True": True, "true": True, "False": False, "false": False}
        values[option] = int(value) if value.isdigit() else words.get(value, value)
    return values


def stack_from_dict(data: Mapping[str, Any]) -> StackOptions:
    """Return the options from the result of `StackOptions.to_dict`."""
    name = data.get("name")
    if name not in STACKS:
        raise SpecError(f"stack {name!r} is not one of {', '.join(STACKS)}")
    return STACKS[name](**{option: value for option, value in data.items() if option != "name"})


def check_stack(stack: StackOptions | str, given: Mapping[str, Any]) -> None:
    """Raise SpecError if `stack` does not support the run's fields `given`; the message names the stacks that do."""
    if not isinstance(stack, StackOptions):
        return
    for field, values in stack.allowed.items():
        if given[field] not in values:
            supporting = [TRANSFORMERS]
            required = {field: given[field], "pp": given["pp"]}  # a schedule needs a stack with pipelines
            for other in STACKS.values():
                if all(value in other.allowed.get(name, (value,)) for name, value in required.items()):
                    supporting.append(other.name)
            allowed = ", ".join("none" if value is None else repr(value) for value in values)
            if why := stack.unsupported_options.get(field):
                combination = f"{field}={given[field]!r} with stack={stack.name!r}"
                raise SpecError(f"{combination}: {why}; give {field}={allowed}")
            raise SpecError(
                f"{stack.name} has no {field}={given[field]!r}: stack={' or '.join(map(repr, supporting))} has; "
                f"with stack={stack.name!r} give {field}={allowed}"
                + ("; its own options say whether AdamW is fused" if given[field] == "adamw-fused" else "")
            )
    stack.check_run(given)
    for field, value in stack.sets(given).items():
        option = stack.own_names.get(field)
        if option is None or value == given[field]:
            continue
        chosen = getattr(stack, option)
        if chosen is not None:  # None: the run decides, not the stack
            combination = f"{field}={given[field]!r} with stack={type(stack).__name__}({option}={chosen!r})"
            raise SpecError(f"{combination}, which sets {field}={value!r}; give one of them")
