"""The largest value of one size of a run that fits a GPU, or the smallest GPU on which a run fits.

Candidates are sorted by the memory they need, the least first. Bisection over estimates finds the last that surely fits
and the first that surely does not. Simulations decide those in between.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..base.errors import NotAvailable, SpecError, need_packages
from ..base.notes import Note, notes_to_json
from ..base.tables import Table, Tabular
from ..base.terms import Outcome
from ..base.units import show_bytes, show_seconds
from ..formulas.verdict import Verdict, fully_used
from ..hardware.gpu import GPU, gpus
from ..report import Report
from ..specs.check import check
from ..specs.images import images_of
from ..specs.model import ModelSpec
from ..specs.run import Inference, Run, Training
from .confirm import MARGIN, simulated_run, with_margin
from .levers import derived, fix

# The sizes that can be solved for: each with its name in a sentence, and its unit.
SIZES = {
    "seq_len": ("longest sequence", "tokens"), "micro_batch": ("largest micro-batch", "sequences"),
    "batch": ("largest batch", "prompts"), "lora_rank": ("largest LoRA rank", ""), "gpu": ("smallest GPU", ""),
}  # fmt: skip
TOKENS = 128  # the step between sequence lengths
MOST_TOKENS, MOST_SEQUENCES = 1 << 24, 1 << 20
# Simulations try values in steps of 1/32: finer steps change the memory by less than a plan leaves free.
FINE = 32


@dataclass(frozen=True, repr=False)
class Trial:
    """One value with its run: the estimate, the simulation if there was one, whether it fits, and the bytes of the GPU
    that its process leaves free (None if it does not fit)."""

    value: int | str
    report: Report
    simulation: Report | None
    outcome: Outcome
    left: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        simulation = self.simulation.to_dict() if self.simulation else None
        return {"value": self.value, "outcome": self.outcome, "left": self.left, "report": self.report.to_dict(),
                "simulation": simulation}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Solution(Tabular):
    """The answer of `lab.solve`: `best` is the trial of the value that fits, and `over` that of the next value, which
    does not fit; each is None if there is none. `name` is the size that was solved for. `notes` say what limits the
    answer, and what would help."""

    name: str
    best: Trial | None
    over: Trial | None
    notes: tuple[Note, ...]

    @property
    def value(self) -> int | str | None:
        """The value that fits: a size, or the name of a GPU; None if nothing fits."""
        return self.best.value if self.best else None

    @property
    def run(self) -> Run | None:
        """The run with the value that fits; None if nothing fits."""
        return self.best.report.run if self.best else None

    @property
    def outcome(self) -> Outcome:
        """ "fits" if there is a value that fits, "out of memory" if not even the smallest does, else "unknown"."""
        return self.best.outcome if self.best else self.over.outcome if self.over else "unknown"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values; sizes are bytes."""
        trials = {name: trial and trial.to_dict() for name, trial in (("best", self.best), ("over", self.over))}
        return {"name": self.name, "value": self.value, "outcome": self.outcome, **trials,
                "notes": notes_to_json(self.notes)}  # fmt: skip

    @property
    def _title(self) -> str:
        (what, unit), trial = SIZES[self.name], self.best or self.over
        assert trial
        where = "" if self.name == "gpu" else f" on {trial.report.gpu}"
        unit = unit.removesuffix("s") if trial.value == 1 else unit
        answer = f"{_shown(trial.value)} {unit}".strip() if self.best else "none fits"
        return f"{trial.report.model}{where}, {what}: {answer}"

    def _table(self) -> Table:
        rows = [
            (
                _shown(trial.value), show_bytes((trial.simulation or trial.report).peak_allocated),
                "–" if trial.left is None else show_bytes(trial.left), show_seconds(trial.report.step_seconds),
                trial.outcome, trial.simulation.source if trial.simulation else trial.report.source,
            )
            for trial in (self.best, self.over) if trial
        ]  # fmt: skip
        header = (self.name, "peak allocated", "left on the GPU", "time, estimated", "outcome", "by")
        return Table(header, rows, self._title, "\n".join(self.notes), (0, 4, 5))

    def __repr__(self) -> str:
        left = f", {show_bytes(self.best.left)} left" if self.best else ""
        return f"<Solution: {self._title}{left}>"


def _shown(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def solved(spec: ModelSpec, run: Run, gpu: GPU | None, name: str, simulate: bool = True) -> Solution:
    """Return the solution of `lab.solve`, without the notes that `lab.solve` adds."""
    values, at = _candidates(spec, run, gpu, name)

    @cache
    def estimate(index: int) -> tuple[Report, Verdict]:
        changed, device = at(values[index])
        return derived(spec, changed, with_margin(fully_used(device)))

    @cache
    def simulation(index: int) -> Report:
        changed, device = at(values[index])
        if sys.stderr.isatty():  # a large model takes a minute
            print(f"simulating {name}={_shown(values[index])} on {device.name}", file=sys.stderr)
        need_packages("simulating", "torch", "transformers")
        answer = simulated_run(spec.config, changed, fully_used(device))
        if isinstance(answer, str):
            raise NotAvailable(answer)
        return answer

    def trial(index: int, simulated: bool) -> Trial:
        (report, fit), device = estimate(index), at(values[index])[1]
        answer = simulation(index) if simulated else None
        outcome, used = (answer.outcome, answer.process) if answer else (fit.outcome, fit.most)
        if outcome == "out of memory" and not answer:  # perhaps only because of the margin
            outcome = derived(spec, report.run, device)[1].outcome
        left = max(0, device.memory - used) if outcome == "fits" and used else None
        return Trial(values[index], replace(report, capacity=device.memory), answer, outcome, left)

    places, notes = range(len(values)), list[Note]()
    certain = bisect_left(places, True, key=lambda index: estimate(index)[1].outcome != "fits")
    out = bisect_left(places, True, lo=certain, key=lambda index: estimate(index)[1].outcome == "out of memory")
    tried = dict[int, bool]()  # places that were simulated
    best, over = certain - 1, out if certain or not out else 0
    if simulate and out:
        try:
            best, over = _decided(certain, out, simulation, tried)
            free = f"Simulations leave {100 * MARGIN:.0f} % of the GPU free"
            notes.append(Note("margin", f"{free}, because the memory that an allocator reserves differs between runs."))
        except NotAvailable as error:
            notes.append(Note("not-simulated", f"Not simulated: {error}."))
            tried.clear()
    if not tried and best + 1 < out:
        between = f"{_shown(values[max(best, 0)])} and {_shown(values[min(out, len(values) - 1)])}"
        notes.append(Note("near-limit", f"Between {between}, only a simulation can tell."))
    best_trial = trial(best, best in tried) if best >= 0 else None
    over_trial = trial(over, over in tried) if over < len(values) else None
    if best_trial and not over_trial:
        notes.append(_limit(spec, name))
    if not best_trial:
        assert over_trial
        notes += _ways_out(spec, *at(values[0]), over_trial, name)
    return Solution(name, best_trial, over_trial, tuple(notes))


def _decided(
    certain: int, out: int, simulation: Callable[[int], Report], tried: dict[int, bool]
) -> tuple[int, int]:
    """Return the last index that fits by simulation (-1 if none does) and the first after it that does not. By
    estimate, indices below `certain` fit, and indices `out` and above do not."""
    step = max(1, certain // FINE)

    def does_not_fit(index: int) -> bool:
        tried[index] = simulation(index).outcome != "fits"
        return tried[index]

    for indices in (range(max(0, certain - 1), out, step), range(0, max(0, certain - 1), step)):
        fitting_count = bisect_left(indices, True, key=does_not_fit)
        if fitting_count:
            return indices[fitting_count - 1], indices[fitting_count] if fitting_count < len(indices) else out
        out = indices[0] if indices else out
    return -1, 0


def _candidates(
    spec: ModelSpec, run: Run, gpu: GPU | None, name: str
) -> tuple[Sequence[Any], Callable[[Any], tuple[Run, GPU]]]:
    """Return the possible values of `name`, the one that needs least first, and a function that turns a value into a
    run and a GPU."""
    if name not in SIZES:
        raise SpecError(f"{name!r} cannot be solved for; give one of {', '.join(SIZES)}")
    if name == "gpu":
        if gpu is not None:
            raise SpecError(f"gpu={gpu.name!r} was given, and the smallest GPU is asked for; leave one of them out")
        devices = {device.name: device for device in gpus() if device.vendor == "NVIDIA" and _can_be(spec, run, device)}
        if not devices:
            raise SpecError("no GPU of `llmlab gpus` can run this; change its precision or attention")
        return sorted(devices, key=lambda name: -devices[name].memory), lambda value: (run, devices[value])
    if gpu is None:
        raise SpecError(f"{name} depends on the GPU, and none was given; name one, or ask for 'gpu'")
    target = gpu  # not None, for the lambdas below
    if name == "seq_len":
        return _lengths(spec, run), lambda value: (_of_length(run, value), target)
    if name == "lora_rank":
        if isinstance(run, Inference) or run.lora is None:
            raise SpecError("lora_rank needs a training run with adapters; give lora=lab.LoRA(...), whose rank does "
                            "not matter")  # fmt: skip
        lora = run.lora
        return range(1, spec.hidden + 1), lambda value: (replace(run, lora=replace(lora, rank=value)), target)
    field = "micro_batch" if isinstance(run, Training) else "batch"
    if name != field:
        raise SpecError(f"{name} is not a field of {type(run).__name__}; give {field}")
    return range(1, MOST_SEQUENCES + 1), lambda value: (replace(run, **{name: value}), target)


def _can_be(spec: ModelSpec, run: Run, gpu: GPU) -> bool:
    """Return whether the run is possible on the GPU. Raises SpecError if it is possible on no GPU."""
    check(spec, run)
    try:
        check(spec, run, gpu)
    except SpecError:
        return False
    return True


def _lengths(spec: ModelSpec, run: Run) -> range:
    """Return the sequence lengths to try: multiples of TOKENS and of the number of context-parallel ranks."""
    most = MOST_TOKENS if spec.rotary else spec.max_positions
    if isinstance(run, Training):
        images = images_of(spec, replace(run, seq_len=MOST_TOKENS))
        least, step = images.needed if images else 1, min(TOKENS, most) * run.cp
    else:
        least, step = run.new_tokens + 1, min(TOKENS, most)
    if least > most:
        raise SpecError(f"{spec.name} has {most:,} positions, and the run needs at least {least:,}; give fewer tokens")
    return range(-(-least // step) * step, max(most, step) + 1, step)


def _of_length(run: Run, tokens: int) -> Run:
    if isinstance(run, Inference):
        return replace(run, prompt_len=tokens - run.new_tokens)
    return replace(run, seq_len=tokens)


def _limit(spec: ModelSpec, name: str) -> Note:
    """Return a note that names the limit if memory is not the limit."""
    why = {
        "seq_len": f"{spec.name} has {spec.max_positions:,} learned positions, so memory is not the limit",
        "lora_rank": f"The matrices of {spec.name} have no higher rank, so memory is not the limit",
        "gpu": "No GPU of the table that can run this has less memory",
    }.get(name, "No larger value was tried")
    return Note("limit", f"{why}.")


def _ways_out(spec: ModelSpec, run: Run, device: GPU, refused: Trial, name: str) -> list[Note]:
    """Return notes that say by how much the smallest run exceeds the GPU, the smallest GPU on which it fits, and the
    first change that makes it fit this GPU."""
    notes = []
    if refused.outcome == "out of memory":
        least = derived(spec, run, device)[1].least
        needs = f"needs at least {show_bytes(least)}, {show_bytes(least - device.memory)} more than {device.name} has"
        if least <= device.memory:
            needs = f"runs out of memory in a simulation of {device.name}"
        subject = "The run" if name == "gpu" else f"Even {name}={_shown(refused.value)}"
        notes.append(Note("problem", f"{subject} {needs}."))
    same_vendor = sorted((gpu for gpu in gpus() if gpu.vendor == device.vendor), key=lambda gpu: gpu.memory)
    fits = (gpu for gpu in same_vendor if _can_be(spec, run, gpu) and derived(spec, run, gpu)[1].outcome == "fits")
    if name != "gpu" and (other := next(fits, None)):
        notes.append(Note("larger-gpu", f"By estimate, the smallest GPU that fits this run is the {other.name}."))
    levers = fix(spec, run, device, estimate=derived).levers
    if lever := next((lever for lever in levers if lever.report.outcome == "fits"), None):
        notes.append(Note("lever", f"By estimate, one change makes it fit on the {device.name}: {lever.name}."))
    return notes
