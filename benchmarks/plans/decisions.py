"""Does it fit? What each tool decides about published steps, some of which ran and some of which ran out of memory.

    python -m benchmarks.plans.decisions                           # prints
    python -m benchmarks.plans.decisions --out benchmarks/results  # and writes decisions.md, which the book includes

A decision is a tool's own verdict. What a tool says of rows that were in view is counted apart from what it says of the
later sessions. Tools without a verdict are not here. Simulating all rows takes a quarter of an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click

import llmlab as lab
from benchmarks.memory.questions import fitcheck_verdict, installed, llmlab_verdict, simulated_verdict
from benchmarks.provenance import provenance, titled_table, write
from llmlab import ModelSpec, Report, Training
from llmlab.archive import held_out, records

FITS, OVER, UNSURE = "fits", "out of memory", "cannot tell"
HEADER = ["tool", "ran: says it fits", "does not", UNSURE, "ran out: says it does not fit", "fits", UNSURE]
KINDS = {False: "in view while formulas and simulator were written", True: "of two later sessions"}
Decide = Callable[[ModelSpec, Training], str | None]


def decision(said: str) -> str:
    """Return a verdict in the three words of the tables.

    >>> decision("unknown"), decision("does_not_fit"), decision("safe")
    ('cannot tell', 'out of memory', 'fits')
    """
    words = {"unknown": UNSURE, "uncertain": UNSURE, "does_not_fit": OVER, OVER: OVER, "safe": FITS, FITS: FITS}
    return words[said]  # an unknown word is an error, not a fourth column


TOOLS: dict[str, tuple[str, Decide]] = {
    "llmlab estimate": ("llmlab", llmlab_verdict),
    "llmlab simulate": ("llmlab", simulated_verdict),
    "fitcheck": ("fitcheck-llm", fitcheck_verdict),
}


def steps(later: bool) -> list[Report]:
    """Return the published training steps on a T4 that ran or ran out of memory, of one of the two kinds."""
    found = [row for row in records(gpu="T4", source="published") if held_out(row) == later]
    return [row for row in found if isinstance(row.run, Training) and row.outcome in (FITS, OVER)]


def counts(said: Iterable[tuple[str, str]]) -> list[str]:
    """Return the cells of a tool: of (what happened, what it said), how often each.

    >>> counts([("fits", "fits"), ("fits", "cannot tell"), ("out of memory", "fits")])
    ['1 of 2', '0', '1', '0 of 1', '1', '0']
    """
    pairs = list(said)
    cells = []
    for happened, order in ((FITS, (FITS, OVER, UNSURE)), (OVER, (OVER, FITS, UNSURE))):
        of = [word for truth, word in pairs if truth == happened]
        right, *others = (of.count(word) for word in order)
        cells += [f"{right} of {len(of)}" if of else "–", *(str(n) if of else "–" for n in others)]
    return cells


def rows(reports: list[Report]) -> list[list[str]]:
    """Return a text row per tool, of the steps that it can be asked for."""
    found = []
    for name, (package, decide) in TOOLS.items():
        if installed(package) is None:
            found.append([name, "not installed", *["–"] * (len(HEADER) - 2)])
            continue
        said = [(report.outcome, decide(lab.model(report.model), report.run)) for report in reports]
        found.append([name, *counts((happened, decision(word)) for happened, word in said if word is not None)])
    return found


def to_markdown(made: str) -> str:
    text = []
    for later, kind in KINDS.items():
        reports = steps(later)
        text += titled_table(f"Decisions about {len(reports)} published steps on a T4, {kind}", HEADER, rows(reports))
    notes = [
        "A decision is a tool's own verdict. lab.estimate and fitcheck leave a margin, and may say that they cannot "
        "tell. Tools that give bytes of tensors or of weights alone have no verdict.",
    ]
    return "\n".join([*text, *(f"- {note}" for note in notes), "", made])


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write decisions.md here.")
def main(out: Path | None) -> None:
    """Count what each tool decides about published steps."""
    text = to_markdown(provenance("llmlab", "torch", "transformers", "peft", "bitsandbytes", "fitcheck-llm"))
    print(text)
    if out:
        write(out / "decisions.md", text)


if __name__ == "__main__":
    main()
