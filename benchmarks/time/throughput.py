"""Predict the training throughputs that others published, and say how far off that is, beside what others predict.

    python -m benchmarks.time.throughput                           # prints
    python -m benchmarks.time.throughput --out benchmarks/results  # and writes throughput.md
    python -m benchmarks.time.throughput --once SOURCE ...         # appends what is predicted of new sources, once

The rows are those of throughputs.toml, in two groups: sources that constants come from, and sources looked at while the
formulas were written; a third, never seen, is predicted by --once alone. Many of the second were never seen at first:
what was predicted of them then, once, before any change in view of them, is in predictions.json, round by round, and
stays what it was. HISTORY.md describes the rounds. --once cannot be undone: check first that the model of each row is
known. Afterwards change the rows' group to "left out", and run training_rates.py --write.

Two more tables hold issues' bars: single GPUs, and cards whose own kernels are left out, so that those of others stand
for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from math import ceil
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

import click

import llmlab as lab
from benchmarks.provenance import folded, provenance, titled_table, write
from benchmarks.time.throughput_peers import PEERS, rule
from benchmarks.time.throughput_rows import UNSEEN, Row, rows
from llmlab.archive import held_out, records
from llmlab.base.errors import NotAvailable, SpecError, UnknownName
from llmlab.formulas.time import kernels as times
from llmlab.formulas.time.efficiency import Efficiency, efficiency
from llmlab.hardware.kernel_tables import KernelTable, kernel_table
from llmlab.hardware.links import cluster

PREDICTIONS = Path(__file__).with_name("predictions.json")
GROUPS = ("in sample", "left out")
NEVER_SEEN = "never seen when predicted"
SINGLE = ("H200", "H100", "A100")  # all their kinds, beside the T4, whose steps are the archive's
WORST, MEDIAN, SINGLE_BAR, TRANSFER_BAR, HELD = 0.3, 0.1, 0.1, 0.15, 0.8
STRICT = 14  # since this round a row has at most one detail assumed, and its step does nothing but train
FITTED = "6ND at the median share of each GPU, found afterwards"
REFUSED = (NotAvailable, SpecError, UnknownName)


@dataclass(frozen=True)
class Predicted:
    """Tokens/s per GPU: `rate` and its interval `low` to `high`, None where no time is known, which `why` says."""

    rate: float | None
    low: float | None = None
    high: float | None = None
    why: str = ""


def predict(row: Row) -> Predicted:
    """Return what `llmlab.estimate` says of a row."""
    try:
        nodes = cluster(row.card, **row.nodes) if row.run.world_size > 1 and row.nodes is not None else None
        report = lab.estimate(row.model, row.run, lab.gpu(row.card, row.power), nodes)
    except REFUSED as error:
        return Predicted(None, why=str(error))
    if report.step_seconds is None:
        return Predicted(None, why=next((note for note in report.notes if note.code == "time-unknown"), "no time"))
    tokens = row.run.global_batch * row.run.seq_len / row.run.world_size
    low, high = (getattr(report, f"step_seconds_{end}", None) for end in ("high", "low"))
    return Predicted(tokens / report.step_seconds, low and tokens / low, high and tokens / high)


Pairs = list[tuple[Row, Predicted]]
Answers = dict[str, dict[str, float | None]]  # tokens/s per GPU, by tool and by the id of a row
TOOLS = ["tool", "rows", "median error", "90th percentile", "worst", "llmlab, same rows: median", "90th percentile",
         "worst"]  # fmt: skip


@dataclass(frozen=True)
class Errors:
    """Of some rows: how many have a prediction, its median, 90th percentile and largest error, and the share inside
    their interval."""

    rows: int
    known: int
    median: float
    ninth: float
    worst: float
    inside: float | None

    def __str__(self) -> str:
        if not self.known:
            return f"{self.known} of {self.rows} rows"
        held = "" if self.inside is None else f", inside the interval {self.inside:.0%}"
        spread = f"median {self.median:.1%}, 90th percentile {self.ninth:.0%}, worst {self.worst:.0%}"
        return f"{self.known} of {self.rows} rows, {spread}{held}"


def errors(found: Pairs) -> Errors:
    """Return the errors of predictions, as shares of what was measured."""
    off = [abs(it.rate / row.measured - 1) for row, it in found if it.rate]
    held = [it.low <= row.measured <= it.high for row, it in found if it.low and it.high]
    return _summary(len(found), off, sum(held) / len(held) if held else None)


def _summary(rows: int, off: list[float], inside: float | None) -> Errors:
    if not off:
        return Errors(rows, 0, 0.0, 0.0, 0.0, inside)
    ninth = sorted(off)[ceil(0.9 * len(off)) - 1]
    return Errors(rows, len(off), median(off), ninth, max(off), inside)


def rounds(among: list[Row]) -> Iterator[tuple[str, Pairs]]:
    """Return the rounds of predictions that were written down before anybody had compared the rows, each by name."""
    by_id = {row.id: row for row in among}
    for each in json.loads(PREDICTIONS.read_text(encoding="utf-8"))["rounds"]:
        written = {id: Predicted(*values) if values else Predicted(None) for id, values in each["predicted"].items()}
        yield f"round {each['round']}, {each['date']}", [(by_id[id], it) for id, it in written.items()]


@contextmanager
def without(card: str) -> Iterator[None]:
    """Let kernels that were measured on `card` be unknown for a while: those of other cards stand for them."""

    def fitted(each: lab.GPU | str) -> Efficiency | None:
        # Its host, which is asked for by name, stays: all cards have that one's times.
        return None if isinstance(each, lab.GPU) and each.name == card else efficiency(each)

    def measured(name: str) -> KernelTable | None:
        return None if name == card else kernel_table(name)

    kept = [name for name in times.training_rates()["measured"] if name != card]
    hidden = patch.object(times, "kernel_table", measured), patch.object(times, "efficiency", fitted)
    caches = times.kernels, times._matmul
    with hidden[0], hidden[1], patch.dict(times.training_rates(), measured=kept):
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


def transferred(found: Pairs) -> Iterator[tuple[str, str, Pairs, Pairs]]:
    """Return, for each card of the rows that has measured kernels: its name, the card that stands for it, its rows with
    its own kernels, and without them."""
    for card in times.training_rates()["measured"]:
        if own := [each for each in found if each[0].card == card and errors([each]).known]:
            with without(card):
                base = times.kernels(card).base.name
                other = [(row, predict(row)) for row, _ in own]
            yield card, base, own, other


def single(found: Pairs) -> Iterator[tuple[str, Errors]]:
    """Return the errors of training on one GPU, by card; the T4's of steps that no rate comes from."""
    for card in SINGLE:
        if own := [each for each in found if each[0].card.startswith(card) and each[0].run.world_size == 1]:
            yield card, errors(own)
    off = [
        abs(lab.estimate(one.model, one.run, "T4").step_seconds / one.step_seconds - 1)
        for one in records(gpu="T4") if one.source == "published" and one.step_seconds and held_out(one)
    ]  # fmt: skip
    if off:
        yield "T4, held out", _summary(len(off), off, None)


def text(found: Pairs) -> Iterator[str]:
    """Return the lines of the results file."""
    answers = {name: {row.id: ask(row) for row, _ in found} for name, ask in PEERS.items()}
    written = list(rounds([row for row, _ in found]))
    first = [each for _, pairs in written for each in pairs]
    lines = list(tools(first, answers | {FITTED: fitted(first)}))
    yield from titled_table("Rows never seen when predicted", TOOLS, lines)
    yield doubts([each for each in first if each[1].rate])
    groups = {group: [each for each in found if each[0].group == group] for group in GROUPS} | {NEVER_SEEN: first}
    lines = []
    certain = [(row, one) for row, one in first if not row.assumed]
    for group, mine in (*groups.items(), (f"{NEVER_SEEN}, and no detail of the run assumed", certain)):
        others = ([(row, Predicted(by_id[row.id])) for row, _ in mine] for by_id in answers.values())
        lines.append([group, *(str(errors(some)) for some in (mine, *others))])
    yield from titled_table("By group", ["group", "llmlab", *answers], lines)
    yield f"Bars: median at most {MEDIAN:.0%}, worst at most {WORST:.0%}, none unknown, {HELD:.0%} inside.\n"
    strict = [each for _, pairs in written[STRICT - 1 :] for each in pairs]
    lines = [_round(*each) for each in (*written, (f"{STRICT} to {len(written)}", strict))]
    header = ["round", "sources", "rows", "median", "worst", "inside", "> 30%", "worst row", "certain"]
    yield from titled_table("Unseen rows by round, with the errors as recorded", header, lines)
    yield f"{written[0][0].capitalize()}, to {written[-1][0]}. Certain: rows with nothing assumed, median, worst.\n"
    lines = [[card, str(got), "yes" if got.median <= SINGLE_BAR else "no"] for card, got in single(found)]
    header = ["card", "llmlab", "median at most 10 %"]
    yield from titled_table("Training on one GPU: full fine-tuning or adapters", header, lines)
    moved = list(transferred(found))
    own, other = ([pair for each in moved for pair in each[of]] for of in (2, 3))
    moved.append(("all of these", "", own, other))
    lines = [[card, base, str(errors(own)), str(errors(other)), "yes" if errors(other).median <= TRANSFER_BAR else "no"]
             for card, base, own, other in moved]  # fmt: skip
    header = ["card", "whose kernels stand for it", "with its own kernels", "without them", "median at most 15 %"]
    yield from titled_table("GPUs predicted from the kernels of another GPU", header, lines)
    header = ["run", "measured", "predicted", "error", "10–90 %", "inside", *(name.split()[0] for name in answers)]
    for group, mine in groups.items():
        lines = [_line(row, it, [by_id[row.id] for by_id in answers.values()]) for row, it in mine]
        yield from titled_table(f"Tokens per second and GPU, {group}", header, lines)
    yield from folded("Sources", [f"- {citation}" for citation in dict.fromkeys(row.citation for row, _ in found)])
    assumed: dict[str, list[str]] = {}
    for row, _ in found:
        assumed.setdefault(row.assumed, []).append(row.id)
    lines = [f"- {text}: {', '.join(ids)}" for text, ids in assumed.items() if text]
    yield from folded("Assumptions, where a source leaves out a detail or where our model differs from the run", lines)
    yield provenance("llmlab", "llm-analysis")


def fitted(pairs: Pairs) -> dict[str, float | None]:
    """Return the tokens/s per GPU of 6ND at the share of the peak that each GPU reached at the median of these rows."""
    rates = {row.id: rule(row) for row, _ in pairs}
    reached: dict[str, list[float]] = {}
    for row, _ in pairs:
        if rate := rates[row.id]:
            reached.setdefault(row.card, []).append(row.measured / rate)
    return {row.id: rate and rate * median(reached[row.card]) for row, _ in pairs for rate in [rates[row.id]]}


def doubts(pairs: Pairs) -> str:
    """Return how wide the intervals are, and the errors if each source counts once, however many rows it has."""
    width = median(it.high / it.low for _, it in pairs if it.high and it.low)
    sources = [errors([each for each in pairs if each[0].source == one]) for one in {row.source for row, _ in pairs}]
    error, inside = median(one.median for one in sources), fmean(one.inside or 0 for one in sources)
    return (
        f"At the median, the upper end of llmlab's interval is {width:.2f} times the lower end. If each of the "
        f"{len(sources)} sources counts once, the median error is {error:.1%}, and {inside:.0%} are inside.\n"
    )


def tools(pairs: Pairs, answers: Answers) -> Iterator[list[str]]:
    """Return a line for each tool: its errors where it answers, and those of llmlab in the same rows."""

    def cells(some: Pairs) -> list[str]:
        of = errors(some)
        return [f"{of.median:.1%}", f"{of.ninth:.0%}", f"{of.worst:.0%}"] if of.known else ["–"] * 3

    yield ["llmlab", str(errors(pairs).known), *cells(pairs), *cells(pairs)]
    for name, by_id in answers.items():
        both = [(row, it) for row, it in pairs if it.rate and by_id[row.id]]
        yield [name, str(len(both)), *cells([(row, Predicted(by_id[row.id])) for row, _ in both]), *cells(both)]


def _round(name: str, pairs: Pairs) -> list[str]:
    got, sure = errors(pairs), errors([(row, it) for row, it in pairs if not row.assumed])
    off = {row.id: abs(it.rate / row.measured - 1) for row, it in pairs if it.rate}
    counted = f"{got.rows}" if got.known == got.rows else f"{got.known} of {got.rows}"
    certain = f"{sure.rows}: {sure.median:.1%}, {sure.worst:.0%}" if sure.known else "0"
    sources, beyond = len({row.source for row, _ in pairs}), sum(error > WORST for error in off.values())
    shares = f"{got.median:.1%}", f"{got.worst:.0%}", f"{got.inside or 0:.0%}"
    told = [name.removeprefix("round ").partition(",")[0], f"{sources}", counted, *shares, f"{beyond}"]
    return [*told, max(off, key=off.__getitem__), certain]


def _line(row: Row, it: Predicted, answers: Iterable[float | None]) -> list[str]:
    others = [f"{rate / row.measured - 1:+.0%}" if rate else "" for rate in answers]
    cells = [f"{row.id} {row.shown}", f"{row.measured:,.0f}"]
    if it.rate is None:
        cells += ["unknown", "", "", ""]
    else:
        span = f"{it.low:,.0f} to {it.high:,.0f}" if it.low and it.high else ""
        inside = ("yes" if it.low <= row.measured <= it.high else "no") if it.low and it.high else ""
        cells += [f"{it.rate:,.0f}", f"{it.rate / row.measured - 1:+.1%}", span, inside]
    return [*cells, *others]


def record(new: list[Row], today: str) -> None:
    """Append a round to predictions.json: what is predicted of rows that no round has; ValueError for one that has."""
    kept = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["rounds"]
    seen = {id for each in kept for id in each["predicted"]}
    if known := [row.id for row in new if row.id in seen]:
        raise ValueError(f"predicted before: {', '.join(known)}")
    lines = []
    for row in new:
        it = predict(row)
        values = [round(value, 1) for value in (it.rate, it.low, it.high) if value] or None
        lines.append(f"    {json.dumps(row.id)}: {json.dumps(values)}")
    text = PREDICTIONS.read_text(encoding="utf-8").rstrip()
    closed = text.removesuffix("]}").rstrip()
    head = f'  {{"round": {len(kept) + 1}, "date": "{today}", "predicted": {{\n'
    PREDICTIONS.write_text(closed + ",\n" + head + ",\n".join(lines) + "\n  }}\n]}\n", encoding="utf-8")


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write throughput.md there.")
@click.option("--once", multiple=True, help="Predict the rows of this source for the first time, and keep that.")
def main(out: Path | None, once: tuple[str, ...]) -> None:
    """Predict every row, and say how far off that is."""
    if once:
        record([row for row in rows() if row.source in once], str(date.today()))
        return
    found = [(row, predict(row)) for row in rows() if row.group != UNSEEN]
    made = "\n".join(text(found))
    print(made)
    if out:
        write(out / "throughput.md", made)


if __name__ == "__main__":
    main()
