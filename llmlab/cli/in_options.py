"""Fields of a run as Python writes them, in the words of the command line: dp=2 is --dp 2."""

from __future__ import annotations

import re

import click

from ..specs.run import LoRA, Training

# A value as Python writes it: a LoRA, text in quotes (or a choice of two), a tuple, or anything up to the next space.
VALUE = r"""(?:lab\.)?LoRA\((?:[^()]|\([^()]*\))*\)|'[^']*'(?:\ or\ '[^']*')?|"[^"]*"|\([^()]*\)|[^\s,;:)]*[^\s,;:.)]"""
FIELD = re.compile(rf"(?<![\w.'-])(?P<fixed>fixed )?(?P<name>[a-z]\w*)(?:=(?P<value>{VALUE})| >= (?P<least>\d+))")
VERB = re.compile(r"(?:ask )?\blab\.([a-z]+)(?:\([^()]*\))?")
OF_LORA = {field: f"lora_{field}" for field in LoRA.__dataclass_fields__ if field not in ("rank", "unset", "_")}


def in_options(text: str, command: click.Command) -> str:
    """Return `text`, of an error or a note, with the fields that `command` has as options written as these. A field of
    a run that `llmlab plan` varies is one of --fixed.

    >>> from llmlab.cli.main import cli
    >>> in_options("zero=2 needs dp >= 2; give lora=lab.LoRA(...), or ask lab.estimate", cli.commands["simulate"])
    'zero=2 needs dp >= 2; give lora=lab.LoRA(...), or ask lab.estimate'
    """
    options = {option.name: option for option in command.params if isinstance(option, click.Option)}

    def written(match: re.Match[str]) -> str:
        name, value = OF_LORA.get(match["name"], match["name"]), match["value"]
        if name not in options:
            fixed = "fixed" in options and name in Training.__dataclass_fields__ and value is not None
            return f"--fixed {name}={_plain(value)}" if fixed else match[0]
        option = options[name]
        if value is None:
            return f"{option.opts[0]} {match['least']} or more"
        if option.is_flag:
            off = option.secondary_opts[0] if option.secondary_opts else f"no {option.opts[0]}"
            return option.opts[0] if value == "True" else off
        return f"{option.opts[0]} {_plain(value)}"

    verbs = {verb: f"llmlab {verb}" for verb in click.get_current_context().find_root().command.commands}
    text = VERB.sub(lambda match: f"use `{verbs[match[1]]}`" if match[1] in verbs else match[0], text)
    return FIELD.sub(written, text)


def _plain(value: str) -> str:
    """Return a value as a shell reads it."""
    if "LoRA(" in value:
        rank = re.search(r"rank=(\d+)", value)
        return rank[1] if rank else str(LoRA.rank)
    if value.startswith("("):
        parts = [part.strip(" '\"") for part in value.strip("()").split(",") if part.strip()]
        return ("x" if all(part.isdigit() for part in parts) else ",").join(parts)
    return re.sub("['\"]", "", "none" if value == "None" else value)
