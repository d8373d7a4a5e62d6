"""Megatron-LM's golden values beside estimates, and beside megatron-core's own code on a simulated card.

    python benchmarks/megatron_golden.py                              # prints
    python benchmarks/megatron_golden.py --out benchmarks/results     # and writes megatron_golden.md

Simulated only where megatron-core is installed (see megatron_script.py), each run in a process of its own, because a
module that was imported on a simulated card keeps names of it. The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import click
import megatron_script
from provenance import provenance, table, write
from speed import ROOT

MEDIAN_BAR, WORST_BAR, APART_BAR = 0.05, 0.15, 0.02
HEADER = ["last rank of 8", "published peak, MiB", "estimated", "simulated", "held after a step, MiB", "estimated",
          "simulated"]  # fmt: skip
MiB = 1 << 20


ASK = """
import json, sys
sys.path.insert(0, "benchmarks")
import megatron_script as script
name = sys.argv[1]
card, cublas = script.conditions(name)
print(json.dumps(script.simulated(script.RUNS[name], card, script.RANKS - 1, script.RANKS, cublas)))
"""


def simulated(name: str) -> tuple[int, int]:
    """Return what the last rank holds after a step, and its peak, by megatron-core's own code."""
    ran = subprocess.run([sys.executable, "-c", ASK, name], cwd=ROOT, check=True, capture_output=True, text=True)
    held, peak = json.loads(ran.stdout.splitlines()[-1])
    return held, peak


def off(found: int, published: int) -> str:
    """Return how far a figure is from the published one."""
    return f"{found / published - 1:+.2%}"


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write megatron_golden.md to.")
def main(out: Path | None) -> None:
    """Compare estimates and simulations of Megatron-LM with its golden values."""
    runs = find_spec("megatron") is not None
    rows, errors, apart = [], [], []
    for name in megatron_script.RUNS:
        (held, peak), estimates = megatron_script.published(name), megatron_script.estimated(name)
        simulations = simulated(name) if runs else None
        errors.append(abs(estimates[1] / peak - 1))
        cells = [name]
        for number, size in ((1, peak), (0, held)):
            shown = off(simulations[number], size) if simulations else "not simulated"
            cells += [f"{size / MiB:,.0f}", off(estimates[number], size), shown]
        rows.append(cells)
        if simulations:
            errors.append(abs(simulations[1] / peak - 1))
            apart.append(abs(estimates[1] / simulations[1] - 1))
    said = f"Peaks: median error {median(errors):.2%}, worst {max(errors):.2%}"
    said += f"; estimates from simulations at most {max(apart):.2%}." if apart else "."
    text = "\n".join([*table(HEADER, rows), "", said, "", provenance("llmlab", "torch", "megatron-core")])
    print(text)
    if out:
        write(out / "megatron_golden.md", text)
    missed = median(errors) > MEDIAN_BAR or max(errors) > WORST_BAR or (apart and max(apart) > APART_BAR)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
