"""Megatron-LM's golden values beside estimates, and, of its own layers, megatron-core's code on a simulated card; and
what NeMo's recipes print.

    PYTHONPATH=_build/stacks python -m benchmarks.memory.megatron_golden  # prints; after `make stacks`
    PYTHONPATH=_build/stacks python -m benchmarks.memory.megatron_golden --out benchmarks/results

Transformer Engine's kernels do not run here: of its rows there is the estimate. SimuMax and Megatron-LM's own report of
its memory are asked where their checkouts are on the path (questions/megatron_peers.py). The exit code is 1 if a bar is
missed.
"""

from __future__ import annotations

from importlib.util import find_spec
from math import ceil
from pathlib import Path
from statistics import median

import click

from benchmarks.memory import megatron_runs
from benchmarks.memory.questions.megatron_peers import megatron_report, simumax_peak
from benchmarks.provenance import provenance, table, titled_table, write
from llmlab.formulas.verdict import MEGATRON

MEDIAN_BAR, WORST_BAR, APART_BAR = 0.05, 0.15, 0.02
PEERS = {"SimuMax": simumax_peak, "Megatron-LM's report": megatron_report}
HEADER = ["last rank of 8", "published peak, MiB", "estimated", "simulated", *PEERS, "after a step, MiB", "estimated",
          "simulated"]  # fmt: skip
TOOLS = ["tool", "rows", "median error", "90th percentile", "worst"]
RECIPES = ["NeMo's recipe, rank 0", "after backward, MiB", "estimated", "peak reserved, MiB",
           "estimated peak, MiB", "reserved / estimated peak"]  # fmt: skip
MiB = 1 << 20


def off(found: int, published: int) -> str:
    """Return how far a figure is from the published one."""
    return f"{found / published - 1:+.2%}"


def _spread(tool: str, off: list[float]) -> list[str]:
    if not off:
        return [tool, "0", "–", "–", "–"]
    ninth = sorted(off)[ceil(0.9 * len(off)) - 1]
    return [tool, str(len(off)), f"{median(off):.1%}", f"{ninth:.1%}", f"{max(off):.1%}"]


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write megatron_golden.md to.")
def main(out: Path | None) -> None:
    """Compare estimates and simulations of Megatron-LM with its golden values."""
    runs = find_spec("megatron") is not None
    rows, errors, apart = [], [], []
    tools: dict[str, list[float]] = {tool: [] for tool in ("llmlab estimate", "llmlab simulate", *PEERS)}
    for name, run in megatron_runs.RUNS.items():
        (held, peak), estimates = megatron_runs.published(name), megatron_runs.estimated(name)
        asked = megatron_runs.spec_of(run), megatron_runs.training_of(run), megatron_runs.conditions(name)[0]
        answers = [ask(*asked) for ask in PEERS.values()]
        simulations = megatron_runs.simulated(name) if runs and not run.transformer_engine else None
        errors.append(abs(estimates[1] / peak - 1))
        for tool, answer in zip(tools, (estimates[1], simulations and simulations[1], *answers), strict=True):
            tools[tool] += [abs(answer / peak - 1)] if answer else []
        ours, after = (
            [f"{size / MiB:,.0f}", off(estimates[number], size), off(simulations[number], size) if simulations else "—"]
            for number, size in ((1, peak), (0, held))
        )
        rows.append([name, *ours, *(off(answer, peak) if answer else "—" for answer in answers), *after])
        if simulations:
            errors.append(abs(simulations[1] / peak - 1))
            apart.append(abs(estimates[1] / simulations[1] - 1))
    summary = f"The error of the peaks is {median(errors):.2%} at the median and {max(errors):.2%} at most."
    summary += f" Estimates differ from simulations by at most {max(apart):.2%}." if apart else ""
    summary += " Transformer Engine's kernels (TE) run only on a GPU, so its rows have no simulation (—)."
    nemo = []
    for name in megatron_runs.RECIPES:
        held, reserved, stays, peak = megatron_runs.recipe(name)
        sizes = f"{held / MiB:,.0f}", off(stays, held), f"{reserved / MiB:,.0f}", f"{peak / MiB:,.0f}"
        nemo.append([name, *sizes, f"{reserved / peak:.3f}"])
    bound = f"A verdict on a Megatron-LM run allows for {MEGATRON.holes:.2f} times its peak. These runs reserved less."
    lines = [*titled_table("Peaks of Megatron-LM's own tests", TOOLS, [_spread(*each) for each in tools.items()]),
             *table(HEADER, rows), "", summary, "", *table(RECIPES, nemo), "", bound, ""]  # fmt: skip
    text = "\n".join([*lines, provenance("llmlab", "torch", "megatron-core")])
    print(text)
    if out:
        write(out / "megatron_golden.md", text)
    missed = median(errors) > MEDIAN_BAR or max(errors) > WORST_BAR or (apart and max(apart) > APART_BAR)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
