"""What made a results file, where and when; and how it is written."""

from __future__ import annotations

import platform
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmlab.archive.store import write_whole
from llmlab.hardware.this_machine import host

LONG = 25  # rows


def provenance(*packages: str) -> str:
    """Return one line: the versions of `packages` that are installed and of Python, the machine, the date."""
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:  # then the measurement did not use it either
            continue
    here = host()
    made = ", ".join([*versions, f"Python {platform.python_version()}"])
    return f"{made}; {here.cpu}, {here.cores} cores; {date.today().isoformat()}."


def table(header: list[str], rows: list[list[str]], words: bool = False) -> list[str]:
    """Return the lines of a Markdown table, its first column to the left, all where they are `words`; a cell may hold a
    bar, as |error| does."""
    sides = ["---", *["---" if words else "---:"] * (len(header) - 1)]
    first, *others = ([cell.replace("|", r"\|") for cell in row] for row in (header, *rows))
    return [f"| {' | '.join(row)} |" for row in (first, sides, *others)]


def titled_table(title: str, header: list[str], rows: list[list[str]], words: bool = False) -> list[str]:
    """Return the lines of a table below its title; a long one is folded, and a click on its title opens it."""
    lines = table(header, rows, words)
    if len(rows) <= LONG:
        return [f"**{title}**", "", *lines, ""]
    return folded(title, lines)


def folded(title: str, lines: list[str]) -> list[str]:
    """Return `lines` as a click on their title opens them."""
    return ["<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>", ""]


def write(path: Path, text: str) -> None:
    """Write the whole results file, or, if that fails, keep the old one."""
    write_whole(path, text + "\n")
    print(f"written: {path}")
