"""Simulates the best candidates in processes, and replaces a candidate whose simulation refutes it with the next."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from threading import current_thread, main_thread
from types import ModuleType
from typing import Any

from ..base.errors import NotAvailable
from ..base.notes import Note
from ..base.units import show_bytes, show_seconds
from ..formulas.report import fullest
from ..hardware.gpu import GPU, gpu
from ..report import Report
from ..specs.model import ModelSpec
from ..specs.model import model as find_model
from ..specs.run import Run, Training
from .levers import derived
from .result import Candidate, words
from .search import Estimate, Search

SHOWN = 10  # candidates of a plan, each simulated if possible
SIMULATED = 4 * SHOWN  # simulations after which no further batch starts
PROCESSES = 4  # at most, and at most one per core; each uses 1 GiB of host memory
LOOKED_AT = 1_000  # candidates; some are skipped: other micro-batches of a layout, and runs that nothing can decide
# The share of a GPU's memory that a plan leaves free, because a step's reserved memory differs from run to run. Of 37
# held-out steps on a T4, 9 in 10 exceeded their simulation's reserved memory by less than this share of the GPU;
# benchmarks/plans/plans.py derives it.
MARGIN = 0.04
SIMULATED_EAGER = Note(
    "simulated-eager", "Simulated without torch.compile; the compiled step needs at most as much memory."
)
UNDECIDED = "they are too close to the limit, and were not simulated"


class NotSimulated(Executor):
    """Answers every simulation immediately with a sentence, for a search by estimates alone, as in a browser."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(self.reason)
        return answer


@dataclass
class Confirmation:
    """The candidates confirmed so far: one micro-batch per layout or, with the goal "cheapest", one run per kind and
    number of GPUs. Other candidates wait, in case the first is refuted."""

    remaining: Iterator[Estimate]
    by_machines: bool
    candidates: list[Candidate] = field(default_factory=list)
    refuted: list[Training] = field(default_factory=list)
    waiting: list[Estimate] = field(default_factory=list)
    interrupted: bool = False

    def key(self, item: Candidate | Estimate) -> Any:
        run = item.run if not self.by_machines else None
        alike: dict[str, Any] = {"micro_batch": 1, "accumulation": run.pp, "sync_each_batch": True} if run else {}
        return str(item.machines), run and replace(run, **alike)  # interleaving needs a multiple of pp micro-batches

    def batch(self) -> list[Estimate]:
        """Return the candidates to simulate next, as many as are missing."""
        confirmed = set(map(self.key, self.candidates))
        batch: dict[Any, Estimate] = {}
        waiting, self.waiting = self.waiting, []
        for candidate in chain(waiting, self.remaining):
            key = self.key(candidate)
            if key in batch:
                self.waiting.append(candidate)
            elif key not in confirmed:
                batch[key] = candidate
            if len(batch) + len(confirmed) == SHOWN:
                break
        return list(batch.values())

    def judge(self, candidate: Estimate, report: Report, answer: Report | str) -> None:
        """Add the candidate if its simulation confirms it. Without a simulation (`answer` is a sentence), add it if
        its estimate is certain to fit."""
        if isinstance(answer, str):
            if candidate.certain:
                self.candidates.append(Candidate(candidate.run, candidate.machines, report, None, answer))
        elif answer.outcome == "out of memory":
            self.refuted.append(candidate.run)
        else:
            self.candidates.append(Candidate(candidate.run, candidate.machines, report, answer))


def simulated_run(model: dict[str, Any], run: Run, device: GPU | str) -> Report | str:
    """Return the report of a simulation that leaves MARGIN of the GPU free, or a sentence why there is none.

    It simulates `shortened(run)`. If that is the eager step of a compiled run, and it runs out of memory or is sure to
    by its estimate, it simulates the compiled step instead. The report names `run`, and has no times.
    """
    from ..simulation.report import simulated

    spec, whole = find_model(model), gpu(device)
    smaller = with_margin(whole)
    short = exact = run
    if isinstance(run, Training):
        short, exact = shortened(run), replace(shortened(run), compile=run.compile, fp8=run.fp8)
    eager = short
    try:
        if isinstance(short, Training) and short != exact and _surely_over(spec, short, smaller):
            short = exact
        report = simulated(spec, short, smaller, how_much=False)
        if short != exact and report.outcome == "out of memory":
            short = exact
            report = simulated(spec, short, smaller, how_much=False)
        if report.outcome == "unknown":
            return report.notes[0]
    except NotAvailable as error:
        why = str(error).partition("; ")[0]  # without the advice for a simulation that somebody asked for
        return why if short == eager else f"its eager step does not fit, and {why}"
    fused = (SIMULATED_EAGER,) if short != exact else ()
    return replace(
        report, run=run, capacity=whole.memory, timeline=(), modules={}, notes=(*fused, *report.notes), flops=None,
        step_seconds=None, step_seconds_low=None, step_seconds_high=None, tokens_per_second=None, mfu=None,
    )  # fmt: skip


def with_margin(device: GPU) -> GPU:
    """Return the GPU without the memory that a plan leaves free."""
    return replace(device, memory=round(device.memory * (1 - MARGIN)))


def _surely_over(spec: ModelSpec, run: Training, device: GPU) -> bool:
    try:
        return fullest(spec, run, device).outcome == "out of memory"
    except NotAvailable:
        return False


def shortened(run: Training) -> Training:
    """Return the run that is simulated in place of `run` to save time.

    A compiled step becomes an eager one (without fp8), which needs more memory. Without a pipeline, more than two
    micro-batches become two, because the third needs as much memory as the second, except for its token ids.
    """
    short = replace(run, accumulation=min(run.accumulation, 2)) if run.pp == 1 else run
    return replace(short, compile=False, fp8=None) if run.compile else short


def confirm(search: Search, executor: Executor | None) -> Confirmation:
    """Return the first candidates of `search` that their simulation does not refute, the best first.

    A candidate that cannot be simulated is confirmed if its estimate is certain to fit. Ctrl-C ends the search and
    returns the candidates confirmed so far, and others that are certain to fit by their estimates.
    """
    question = search.question
    by_machines = question.goal == "cheapest"
    done = Confirmation(_decidable(search, not isinstance(executor, NotSimulated)), by_machines)
    simulations, batch, answers = 0, list[Estimate](), dict[int, Report | str]()

    def judge() -> None:
        for index in sorted(answers):
            done.judge(batch[index], _report(question.spec, batch[index]), answers[index])
        answers.clear()

    try:
        with _progress() as progress:
            while simulations < SIMULATED and len(done.candidates) < SHOWN and (batch := done.batch()):
                simulations += len(batch)
                _ask(question.spec, batch, executor, answers, progress)
                judge()
    except KeyboardInterrupt:
        done.interrupted = True
        judge()
        fitting = (candidate for candidate in search.seen if candidate.certain and candidate.run not in done.refuted)
        done.remaining = iter(sorted(fitting, key=search.order))
        done.waiting = []
        for candidate in done.batch():
            done.judge(candidate, _report(question.spec, candidate), "Interrupted before its simulation.")
    done.candidates.sort(key=lambda candidate: search.order(search.estimate_of(candidate.run, candidate.machines)))
    return done


def _report(spec: ModelSpec, candidate: Estimate) -> Report:
    return derived(spec, candidate.run, candidate.machines.gpu, candidate.machines.cluster)[0]


def _decidable(search: Search, simulates: bool) -> Iterator[Estimate]:
    """Yield candidates that are certain to fit or that a simulation can decide. It cannot decide a candidate whose
    estimate leaves no margin."""
    for candidate in islice(search, LOOKED_AT):
        try:
            if not candidate.certain:
                _check_simulated(search.question.spec, candidate, simulates)
        except NotAvailable:
            search.cuts[UNDECIDED] += 1
            search.tried -= 1
            continue
        yield candidate


def _check_simulated(spec: ModelSpec, candidate: Estimate, simulates: bool) -> None:
    if not simulates:
        raise NotAvailable("simulation is off")
    from ..simulation.report import check_simulated

    check_simulated(spec, shortened(candidate.run), candidate.machines.gpu)
    if candidate.memory > (1 - MARGIN) * candidate.machines.gpu.memory:
        raise NotAvailable("its estimate leaves no margin")


def _ask(
    spec: ModelSpec, batch: list[Estimate], executor: Executor | None, answers: dict[int, Report | str],
    progress: Callable[[list[Estimate], Mapping[int, Report | str]], None],
) -> None:  # fmt: skip
    """Simulate `batch` and put each answer into `answers` under its index. A simulation whose process died runs once
    more, with no other at the same time; if its process dies again, the answer is a sentence."""
    progress(batch, answers)
    # dask caches a function's result for its arguments, errors included, so the second try uses another function.
    for workers, simulate in ((min(PROCESSES, os.cpu_count() or 1), simulated_run), (1, partial(simulated_run))):
        with _pool(executor, workers) as pool:
            futures: dict[Future[Report | str], int] = {}
            with _alone() if executor is None else nullcontext(), suppress(BrokenExecutor):  # raised by submit
                for index, candidate in enumerate(batch):
                    if index not in answers:
                        futures[pool.submit(simulate, spec.config, candidate.run, candidate.machines.gpu.name)] = index
            for future in as_completed(futures):
                if not _lost(future):
                    answers[futures[future]] = future.result()
                progress(batch, answers)
        if len(answers) == len(batch):
            return
    for index in range(len(batch)):
        answers.setdefault(index, "Not simulated: its process died twice.")


def _lost(future: Future[Report | str]) -> bool:
    """Return whether a process ended without an answer. dask reports this only after several processes died."""
    if future.cancelled():
        return True
    error = future.exception()
    return isinstance(error, BrokenExecutor) or type(error).__name__ == "KilledWorker"


@contextmanager
def _pool(executor: Executor | None, workers: int) -> Iterator[Executor]:
    if executor is not None:
        yield executor
        return
    from concurrent.futures import ProcessPoolExecutor  # imported here: Python in a browser has no processes
    from multiprocessing import active_children, get_context

    # Spawned, because a forked process refers to torch's threads, which do not exist in it.
    running = set(active_children())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _quiet)
    try:
        yield pool
    except KeyboardInterrupt:  # does not wait for running simulations
        for process in set(active_children()) - running:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _alone() -> Iterator[None]:
    """Let processes start without the caller's script and without receiving Ctrl-C.

    A new process would run the script again, up to this call if it has no `if __name__ == "__main__"`. On Ctrl-C, it
    would print a traceback, so a signal that arrives now is raised afterwards. Its handler is replaced as well, because
    a thread that does not block the signal, such as the progress bar's, receives it for the main thread.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    signals: list[int] = []
    handles_signals = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is not None
    handler = signal.signal(signal.SIGINT, lambda number, _: signals.append(number)) if handles_signals else None
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if sys.platform != "win32" else []
    try:
        yield
    finally:
        sys.modules["__main__"] = script
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if handles_signals:
            signal.signal(signal.SIGINT, handler)
    if signals:
        signal.raise_signal(signal.SIGINT)


def _quiet() -> None:
    """Ignore Ctrl-C, which the calling process handles, and silence libraries' warnings about a missing GPU."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.WARNING)


@contextmanager
def _progress() -> Iterator[Callable[[list[Estimate], Mapping[int, Report | str]], None]]:
    """Yield a function of a batch and the answers so far. On a terminal it prints the estimates first, then each run as
    its simulation ends, because simulations take minutes."""
    if not sys.stderr.isatty():
        yield lambda batch, answers: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with Progress(console=console, transient=True) as bar:
        task, printed = bar.add_task("searching", total=None), set[int]()

        def show(batch: list[Estimate], answers: Mapping[int, Report | str]) -> None:
            if not answers:
                printed.clear()
                console.print("Estimated, before simulation:")
                for run in batch:
                    console.print(f"  {words(run.run)}: {show_bytes(run.memory)}, {show_seconds(run.seconds)} per step")
            for index in answers.keys() - printed:
                answer = answers[index]
                simulated = f"not simulated: {answer}"
                if not isinstance(answer, str):
                    simulated = f"simulated, {answer.outcome}, {show_bytes(answer.peak_reserved)}"
                console.print(f"{words(batch[index].run)}: {simulated}")
            printed.update(answers)
            bar.update(task, description="simulating", completed=len(answers), total=len(batch))

        yield show
