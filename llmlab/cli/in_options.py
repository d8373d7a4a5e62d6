"""Fields of a run as Python writes them, in the words of the command line: dp=2 is --dp 2."""

from __future__ import annotations

import re

import click

from .. import verbs
from ..specs.run import LoRA, Training

# A value as Python writes it: LoRA(...) or the options of a stack, text in quotes (or one of two), a tuple, or anything
# up to the next space.
CALL = r"(?:lab\.)?[A-Z]\w*\((?:[^()]|\([^()]*\))*\)"
VALUE = CALL + r"""|'[^']*'(?: or '[^']*')?|"[^"]*"|\([^()]*\)|[^\s,;:)]*[^\s,;:.)]"""
NAME = r"(?<![\w.'-])(?:fixed )?(?P<name>[a-z]\w*)"
# A call stays as it is; a field is one that has a value, or at least a number.
FIELD = re.compile(rf"\blab\.\w+\([^()]*\)|{NAME}(?:=(?P<value>{VALUE})?| >= (?P<least>\d+))")
VERB = re.compile(rf"(ask )?\blab\.({'|'.join({*verbs.__all__} - {'meter', 'write'})})\b(?:\([^()]*\))?")
OF_LORA = {field: f"lora_{field}" for field in ("targets", "alpha", "dropout", "autocast_adapter_dtype")}
OF_LORA["rank"] = "lora"


def in_options(text: str, command: click.Command) -> str:
    """Return `text`, of an error or a note, with the fields that `command` has as options in the form of these. The
    fields that `llmlab plan` varies take the form of --fixed.

    >>> command = click.Command("estimate", params=[click.Option([name]) for name in ("--dp", "--zero", "--lora")])
    >>> in_options("zero=2 needs dp >= 2; give lora=lab.LoRA(...) and zero=0, or ask lab.fix.", command)
    '--zero 2 needs --dp 2 or more; give --lora 16 and --zero 0, or use `llmlab fix`.'
    """
    options = {option.name: option for option in command.params if isinstance(option, click.Option)}

    def written(match: re.Match[str]) -> str:
        name, value = OF_LORA.get(match["name"], match["name"]), match["value"]
        if name not in options:
            fixed = "fixed" in options and name in Training.__dataclass_fields__ and value is not None
            return f"--fixed {name}={_plain(value)}" if fixed else match[0]
        option = options[name]
        if match["least"]:
            return f"{option.opts[0]} {match['least']} or more"
        if option.is_flag and value in ("True", "False"):
            off = option.secondary_opts[0] if option.secondary_opts else f"no {option.opts[0]}"
            return option.opts[0] if value == "True" else off
        return option.opts[0] if value is None else f"{option.opts[0]} {_plain(value)}"

    text = VERB.sub(lambda match: f"{'use ' if match[1] else ''}`llmlab {match[2]}`", text)
    return re.sub(r"\bNone\b", "none", FIELD.sub(written, text))


def _plain(value: str) -> str:
    """Return a value as a shell reads it."""
    if "LoRA(" in value:
        rank = re.search(r"rank=(\d+)", value)
        return rank[1] if rank else str(LoRA.rank)
    if options := re.fullmatch(r"(?:lab\.)?([A-Z]\w*)\((.*)\)", value):  # of a stack
        value = ":".join(filter(None, (options[1].lower(), options[2].replace(" ", ""))))
    if value.startswith("("):
        parts = [part.strip(" '\"") for part in value.strip("()").split(",") if part.strip()]
        return ("x" if all(part.isdigit() for part in parts) else ",").join(parts) or "''"
    return re.sub("['\"]", "", value)
