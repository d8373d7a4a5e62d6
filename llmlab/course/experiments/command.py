"""The command line of every experiment: it reads options from a table, and prints the result as JSON or as lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ...base.errors import NotAvailable, SpecError, UnknownName
from ...ranks.launch import PATIENCE, RankFailed

# By flag: the default value, or the type if there is no default; the help; and further arguments of add_argument.
Options = Mapping[str, tuple[Any, ...]]

STEPS: Options = {"--steps": (20, "optimizer steps (default 20)")}
SEED: Options = {"--seed": (0, None)}
AS_JSON: Options = {"--json": (False, "print JSON")}
LAUNCH: Options = {
    "--ranks": (2, "processes (default 2)"),
    **STEPS,
    **SEED,
    "--patience": (PATIENCE, "seconds that a rank may let others wait (default 10)"),
    **AS_JSON,
}


def command(
    name: str,
    description: str | None,
    options: Options,
    run: Callable[..., Any],
    arguments: list[str] | None,
    show: Callable[[Any], str] = json.dumps,
) -> None:
    """Print the result of `run(**options)` by `show`, or as JSON with --json. A result of None prints nothing.

    Exits with 2 if the options are not possible, and with 1 if a rank fails.
    """
    parser = argparse.ArgumentParser(prog=f"python -m llmlab.course.experiments {name}", description=description)
    for flags, (default, text, *settings) in options.items():
        kind: dict[str, Any] = {"type": type(default), "default": default}
        if default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, type):
            kind = {"type": default}
        parser.add_argument(*flags.split(), help=text, **kind, **(settings[0] if settings else {}))
    values = vars(parser.parse_args(arguments))
    if values.pop("json", False):
        show = json.dumps
    try:
        result = run(**values)
    except (SpecError, UnknownName, NotAvailable) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except RankFailed as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    if result is not None:
        print(show(result), flush=True)


def loss_lines(result: Mapping[str, Any]) -> list[str]:
    """Return a line for the loss of each step of a run."""
    return [f"step {step:3}: {loss:.6f} nats a token" for step, loss in enumerate(result["losses"])]


def sizes(parts: Mapping[str, int]) -> str:
    """Return the bytes of each part as words."""
    return ", ".join(f"{part} {size:,}" for part, size in parts.items()) + " bytes" if parts else "nothing"
