"""What published runs of other stacks took, beside `lab.simulate` and `lab.estimate` with the same stack.

    PYTHONPATH=_build/stacks python benchmarks/stacks.py                              # prints; after `make stacks`
    PYTHONPATH=_build/stacks python benchmarks/stacks.py --out benchmarks/results     # and writes stacks.md

Published are peaks of reserved memory (torch.cuda.memory_stats), whose sources `SOURCES` names. All rows here were in
view as the descriptions were written. Rows of certain configuration are held to `MEDIAN_BAR` and `WORST_BAR`, "fits" to
what happened, and each estimate to its simulation's peak of allocated memory. The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
from provenance import provenance, titled_table, write

import llmlab as lab
from llmlab.base.units import GiB
from llmlab.hardware.gpu import GPU

MEDIAN_BAR, WORST_BAR, ESTIMATE_BAR = 0.05, 0.15, 0.02
H100 = replace(lab.gpu("H100-80GB"), memory=round(95.0396 * GiB))  # with 96 GB, as these runs report it
LLAMA, QWEN = "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-32B"
SOURCES = {
    "#1881": "https://github.com/pytorch/torchtitan/pull/1881 (commit d9bdfbb20, 2025-11-15)",
    "#1690": "https://github.com/pytorch/torchtitan/pull/1690 (commit d66b72a6a, 2025-09)",
    "#2377": "https://github.com/pytorch/torchtitan/pull/2377 (2026-02-26)",
    "#2570": "https://github.com/pytorch/torchtitan/pull/2570 (2026-03-13)",
}
NEWER, NONE = lab.Torchtitan(), lab.Torchtitan(ac="none")
OLDER = lab.Torchtitan(keeps_attention=False)  # these commits' list of what selective checkpointing keeps


@dataclass(frozen=True)
class Row:
    """A published run: GiB reserved (None: it ran out of memory), and whether its configuration is certain."""

    source: str
    what: str
    model: str
    run: lab.Training
    published: float | None
    certain: bool = True
    card: GPU = H100


def qwen(**given: Any) -> lab.Training:
    """Return a run of the Qwen3-32B rows."""
    return lab.Training(seq_len=4096, checkpointing="full", stack="torchtitan", **given)


def llama(stack: lab.Torchtitan, **given: Any) -> lab.Training:
    """Return a run of the Llama 3 8B rows."""
    return lab.Training(seq_len=8192, stack=stack, **given)


B200 = lab.gpu("B200")
ROWS = (
    Row("#1881", "Llama 3 8B, FSDP 64, selective op", LLAMA, llama(OLDER, dp=64), 31.41),
    Row("#1881", "Llama 3 8B, FSDP 4 × TP 2, selective op", LLAMA, llama(OLDER, dp=4, tp=2), 35.33),
    Row("#1690", "Qwen3-32B, FSDP 8, batch 2, full", QWEN, qwen(dp=8, micro_batch=2), 89.33),
    Row("#1690", "Qwen3-32B, FSDP 16, batch 4, full", QWEN, qwen(dp=16, micro_batch=4), 78.48),
    Row("#1690", "Qwen3-32B, FSDP 16, batch 8, full", QWEN, qwen(dp=16, micro_batch=8), None),
    Row("#1690", "Qwen3-32B, FSDP 4 × TP 8, batch 32, full", QWEN, qwen(dp=4, tp=8, micro_batch=32), 70.79),
    Row("#1690", "Qwen3-32B, FSDP 8 × TP 4, batch 16, full", QWEN, qwen(dp=8, tp=4, micro_batch=16), 70.20),
    Row("#1690", "Qwen3-32B, FSDP 8 × TP 4, batch 32, full", QWEN, qwen(dp=8, tp=4, micro_batch=32), None),
    Row("#2377", "Llama 3 8B, FSDP 2 × TP 2, none", LLAMA, llama(NONE, dp=2, tp=2), 67.19, False, B200),
    Row("#2377", "Llama 3 8B, FSDP 2 × TP 2, selective", LLAMA, llama(NEWER, dp=2, tp=2), 45.88, False, B200),
    Row("#2570", "Llama 3 8B, FSDP 4 × TP 2, selective", LLAMA, llama(NEWER, dp=4, tp=2), 28.54, False),
)  # fmt: skip
HEADER = ["run", "published", "simulated, reserved", "simulated, allocated", "estimated", "fits", ""]


@dataclass(frozen=True)
class Result:
    """A row's cells, and its errors: of the simulation to what was published, of the estimate to the simulation."""

    cells: list[str]
    published: float | None
    estimated: float
    fits: bool


def result(row: Row) -> Result:
    """Return what `row` gives."""
    estimate, simulation = lab.estimate(row.model, row.run, row.card), lab.simulate(row.model, row.run, row.card)
    assert estimate.peak_allocated and simulation.peak_allocated and simulation.peak_reserved
    wanted = "fits" if row.published else "out of memory"
    error = simulation.peak_reserved / GiB / row.published - 1 if row.published else None
    apart = estimate.peak_allocated / simulation.peak_allocated - 1
    cells = [
        f"{row.what} ({row.source})",
        f"{row.published:.2f} GiB" if row.published else "out of memory",
        f"{simulation.peak_reserved / GiB:.2f} GiB" + (f" ({error:+.1%})" if error is not None else ""),
        f"{simulation.peak_allocated / GiB:.2f} GiB",
        f"{estimate.peak_allocated / GiB:.2f} GiB ({apart:+.1%})",
        f"{simulation.outcome}; {estimate.outcome}",
        "in view" if row.certain else "in view, not certain: not held",
    ]
    said = simulation.outcome == wanted and estimate.outcome in (wanted, "unknown")
    return Result(cells, error if row.certain else None, apart, said or not row.certain)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write stacks.md into.")
def main(out: Path | None) -> None:
    results = []
    for row in ROWS:
        results.append(result(row))
        print(*results[-1].cells, sep=" | ", flush=True)
    errors = [abs(each.published) for each in results if each.published is not None]
    apart = max(abs(each.estimated) for each in results)
    met = median(errors) <= MEDIAN_BAR and max(errors) <= WORST_BAR and apart <= ESTIMATE_BAR
    met = met and all(each.fits for each in results)
    said = [
        f"Simulated against published, {len(errors)} certain rows: median {median(errors):.1%} (bar {MEDIAN_BAR:.0%}), "
        f"worst {max(errors):.1%} (bar {WORST_BAR:.0%}). Estimated against simulated, all rows: worst {apart:.1%} "
        f"(bar {ESTIMATE_BAR:.0%}). Fits: {sum(each.fits for each in results)} of {len(results)} as it was, or unknown "
        "by the estimate alone.",
        *(f"{name}: {source}." for name, source in SOURCES.items()),
    ]
    lines = titled_table("torchtitan", HEADER, [each.cells for each in results])
    text = "\n".join([*lines, "", *said, "", provenance("llmlab", "torch", "torchtitan"), ""])
    print(text)
    if out:
        write(out / "stacks.md", text)
    sys.exit(not met)


if __name__ == "__main__":
    main()
