"""Branch and bound, the most promising first: a search that yields the best candidates first and computes no more.

One queue holds everything, sorted by a lower bound on the value that the goal minimizes. The bound of machines is the
forward pass at the data sheet's peak, that of a shape is its computation alone, and that of a candidate is the sum of
the terms known so far. The search removes the entry with the lowest bound: machines become shapes, shapes become
candidates, and a candidate is estimated and queued again under its value. A candidate that is removed with its value is
therefore the best of all that are left, and the entries behind it need no further computation.

Configurations that cannot fit are cut before any time is computed: those whose states alone exceed the GPU, and
micro-batches larger than one that did not fit. If the memory of a compiled step cannot be counted, it counts as an
eager step, which needs more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, product
from math import inf
from typing import Any, NamedTuple

from ..base.errors import NotAvailable, SpecError
from ..formulas.memory.states import kept_weights, states
from ..formulas.report import fullest
from ..formulas.time.flops import flops
from ..formulas.time.offload import adam_seconds, crossing
from ..formulas.time.step import loss_waits, passes
from ..formulas.time.timing import timing
from ..hardware.nodes import usual_host
from ..specs.check import check
from ..specs.run import Training
from .files.write import program
from .machines import Machines
from .space import DEGREES, OF_PROGRAM, SHARED, Question, divisors, lengths, shapes, shares

SIZES = ("micro_batch", "accumulation")  # runs that differ only in these share the limit of the micro-batch
# The fields that the bytes of weights and optimizer states depend on.
OF_STATES = ("precision", "lora", "quantization", "optimizer", "zero", "tp", "pp", "cp", "dp", "ep", "dp_replicate",
             "offload")  # fmt: skip
# The reasons why candidates are left out, in the words of the table.
STATES = "their weights and optimizer states alone exceed the GPU's memory"
HOST = "their offloaded states exceed the host's memory"
LARGER = "the same run with a smaller micro-batch already does not fit"
OVER, LATE = "they exceed the GPU's memory", "they take longer than the time limit"
WORSE = "they cannot be better than those shown"
NO_PROGRAM = "no training program that llmlab writes files for can run them"


class Estimate(NamedTuple):
    """A candidate with its estimates: the minimum bytes of the process on the fullest GPU, and the seconds of an update
    (None: not known)."""

    run: Training
    machines: Machines
    memory: int
    seconds: float | None
    certain: bool  # whether it fits even with the highest estimate of its memory


class Shape(NamedTuple):
    """A shape, the seconds of its computation alone, and `rest`, the shares that it can be combined with."""

    fields: Mapping[str, Any]
    machines: Machines
    seconds: float
    rest: tuple[Mapping[str, Any], ...]


@dataclass
class Search:
    """The search for the answers to one question. `tried` counts the estimated candidates that may fit (in time), and
    `cuts` the others by reason, so that each candidate is counted once. `seen` are all candidates whose memory and time
    are known."""

    question: Question
    machines: Iterable[Machines]
    tried: int = 0
    cuts: Counter[str] = field(default_factory=Counter)
    seen: list[Estimate] = field(default_factory=list)
    refused: SpecError | None = None  # of the first invalid combination

    def __post_init__(self) -> None:
        self._numbers = count()
        self._queue: list[tuple[float, float, int, Any]] = []
        self._least: dict[tuple[Any, ...], int] = {}
        self._shares: dict[tuple[Machines, int], tuple[dict[str, Any], ...]] = {}
        self._programs: dict[tuple[Any, ...], bool] = {}
        self._edges: dict[tuple[Any, ...], int] = {}
        for machines in self.machines:
            self._push(self._floor(machines), machines)

    def __iter__(self) -> Iterator[Estimate]:
        """Yield the candidates that may fit, the best first; of equally good ones, the one with less memory first."""
        while self._queue:
            *_, item = heappop(self._queue)
            if isinstance(item, Estimate):
                yield item
            elif isinstance(item, Machines):
                self._shapes(item)
            elif isinstance(item, Shape):
                self._expand(item)
            else:
                self._estimate(*item)

    def order(self, candidate: Estimate) -> tuple[float, float]:
        """Return the key that candidates are sorted by: the value that the goal minimizes, then memory."""
        seconds = inf if candidate.seconds is None else candidate.seconds
        return self._value(seconds, candidate.machines, candidate.memory), candidate.memory

    def estimate_of(self, run: Training, machines: Machines) -> Estimate:
        """Return the estimates of a run that was yielded."""
        return next(known for known in self.seen if known.machines is machines and known.run == run)

    def worse(self) -> int:
        """Return the number of candidates still in the queue, whose bounds exceed all values yielded so far."""
        waiting = [item for *_, item in self._queue if not isinstance(item, (Estimate, Machines))]
        return sum(len(item.rest) if isinstance(item, Shape) else 1 for item in waiting)

    @property
    def cut(self) -> int:
        return sum(self.cuts.values())

    def _push(self, bound: float, item: Any, memory: float = 0) -> None:
        heappush(self._queue, (bound, memory, next(self._numbers), item))

    def _value(self, seconds: float, machines: Machines, memory: float) -> float:
        """Return the value that the goal minimizes: seconds or dollars per update, or bytes."""
        if self.question.goal == "smallest":
            return memory
        return seconds * (machines.usd_per_hour or inf) / 3600 if self.question.goal == "cheapest" else seconds

    # ---- from machines to candidates

    def _floor(self, machines: Machines) -> float:
        """Return the goal's value if the forward pass ran at the GPU's peak in its fastest dtype and nothing else did:
        a lower bound."""
        peak = max(machines.gpu.peak(dtype) or 0 for dtype in ("fp32", "fp16", "bf16", "fp8")) or inf
        seq_len, batch = list(lengths(self.question))[-1]
        forward = flops(self.question.spec, Training(seq_len=seq_len, accumulation=batch), machines.gpu).forward
        return self._value(forward / peak / machines.total, machines, 0.0)

    def _shapes(self, machines: Machines) -> None:
        for fields in shapes(self.question, machines):
            runnable = self._run_by_programs(fields, machines, self._shares_of(machines, fields["dp"]))
            try:
                seconds = self._compute(fields, machines, len(runnable))
            except SpecError as error:
                self.refused = self.refused or error
                continue
            except NotAvailable:  # the stack's block is not described with these fields
                continue
            if seconds is not None and runnable:
                self._push(self._value(seconds, machines, 0.0), Shape(fields, machines, seconds, runnable))

    def _shares_of(self, machines: Machines, dp: int) -> tuple[Mapping[str, Any], ...]:
        if (machines, dp) not in self._shares:
            self._shares[machines, dp] = tuple(shares(self.question, machines, dp))
        return self._shares[machines, dp]

    def _run_by_programs(
        self, fields: Mapping[str, Any], machines: Machines, shares: tuple[Mapping[str, Any], ...]
    ) -> tuple[Mapping[str, Any], ...]:
        """Return the shares with which a program can run the shape: all of them if the stack has its own program."""
        if self.question.stack.own_program:
            return shares
        shape_key = (machines.gpu.name, *map(fields.get, OF_PROGRAM), *(fields[degree] > 1 for degree in DEGREES))
        runnable = []
        for share in shares:
            key = (*shape_key, share.get("optimizer"), share["offload"], share["zero"], share["ep"] > 1,
                   share["dp_replicate"] > 1)  # fmt: skip
            if key not in self._programs:
                self._programs[key] = self._has_program({**fields, **share}, machines)
            if self._programs[key]:
                runnable.append(share)
            else:
                self.cuts[NO_PROGRAM] += 1
        return tuple(runnable)

    def _has_program(self, fields: Mapping[str, Any], machines: Machines) -> bool:
        try:
            run = Training(**fields)
            check(self.question.spec, run, machines.gpu)
        except SpecError:  # an invalid run is cut elsewhere
            return True
        try:
            program(self.question.spec, run)
        except SpecError as error:
            self.refused = self.refused or error
            return False
        return True

    def _compute(self, fields: Mapping[str, Any], machines: Machines, candidates: int) -> float | None:
        """Return the seconds of computation alone, with the pipeline's bubble; None for a dtype that the GPU has no
        units for, or if these seconds already miss the deadline."""
        run = Training(**{name: value for name, value in fields.items() if name not in SHARED})
        check(self.question.spec, run, machines.gpu)
        passed = passes(self.question.spec, run, machines.gpu)
        if passed is None:
            return None
        # Only the last stage computes the loss and waits for it, so the mean over stages has 1/pp of both.
        other_loss = (1 - 1 / run.pp) * passed.loss
        mean = passed._replace(loss=passed.loss - other_loss, host=passed.host - loss_waits(run, 0.0, other_loss))
        seconds = mean.seconds * (1 + (run.pp - 1) / run.accumulation / run.virtual_stages)
        if self.question.late(seconds, run):
            self.cuts[LATE] += candidates
            return None
        return seconds

    def _expand(self, shape: Shape) -> None:
        for share in shape.rest:
            fields = {**shape.fields, **share}
            least = self._least_memory(fields, shape.machines)
            if least > shape.machines.gpu.room(shape.machines.total):
                self.cuts[STATES] += least < inf
                continue
            update = self._on_host(fields, shape.machines) if share["offload"] else 0.0
            if update is None:
                self.cuts[HOST] += 1
                continue
            self._push(self._value(shape.seconds + update, shape.machines, least), (fields, shape.machines))

    def _least_memory(self, fields: Mapping[str, Any], machines: Machines) -> float:
        """Return the bytes of weights and optimizer states on the fullest GPU; infinity for an invalid run."""
        key = (machines, *(fields.get(name) for name in OF_STATES))
        if key not in self._least:
            try:
                run = Training(**fields)
                check(self.question.spec, run, machines.gpu)
            except SpecError as error:
                self.refused = self.refused or error
                return inf
            self._least[key] = max(least_memory(self.question, run, stage) for stage in {0, run.pp - 1})
        return self._least[key]

    def _on_host(self, fields: Mapping[str, Any], machines: Machines) -> float | None:
        """Return the minimum seconds of the host's update of offloaded states; None if the states exceed one GPU's
        share of a known host memory."""
        try:
            run = Training(**fields)
        except SpecError:  # not supported by the stack; `_estimate` refuses it, too
            return 0.0
        sent, host = crossing(self.question.spec, run), usual_host(machines.gpu)
        gpus = max(host.gpus, machines.per_node)
        # If parameters are offloaded, too, the host also stores the trained weights in 16 bits.
        weights = 2 * sent.stepped if run.offload == "optimizer+parameters" else 0
        if host.source and sent.state + weights > host.memory / gpus:
            return None
        return adam_seconds(sent.stepped_bytes, host, gpus)

    def _estimate(self, fields: Mapping[str, Any], machines: Machines, known: Container[Training] = ()) -> None:
        try:
            run = Training(**fields)
            check(self.question.spec, run, machines.gpu)
        except SpecError as error:
            self.refused = self.refused or error
            return
        memory = None if run in known else self._memory(run, machines)
        if memory is None:
            return
        bytes_, certain = memory
        seconds = timing(self.question.spec, run, machines.gpu, machines.cluster).seconds
        if seconds is not None and self.question.late(seconds, run):
            self.cuts[LATE] += 1
            return
        self.tried += 1
        candidate = Estimate(run, machines, bytes_, seconds, certain)
        self.seen.append(candidate)
        self._push(self.order(candidate)[0], candidate, bytes_)

    def _memory(self, run: Training, machines: Machines) -> tuple[int, bool] | None:
        """Return the bytes of the fullest GPU and whether they are sure to fit; None if they do not fit.

        Memory grows with the micro-batch. If one does not fit, the smallest that does not is searched for, and larger
        ones are cut without an estimate.
        """
        key = (machines, *(value for name, value in run.values().items() if name not in SIZES))
        if run.micro_batch >= self._edges.get(key, inf):
            self.cuts[LARGER] += 1
            return None
        try:
            fit = fullest(self.question.spec, run, machines.gpu)
        except NotAvailable:
            return None
        if fit.outcome != "out of memory":
            return fit.least, fit.outcome == "fits"
        self.cuts[OVER] += 1
        self._edges[key] = self._edge(run, machines)
        return None

    def _edge(self, run: Training, machines: Machines) -> int:
        """Return the smallest micro-batch that does not fit, given a run that does not."""
        per_rank = run.micro_batch * run.accumulation
        free = "micro_batch" not in self.question.fixed
        sizes = [size for size in divisors(per_rank) if size < run.micro_batch] if free else []

        def does_not_fit(size: int) -> bool:
            smaller = replace(run, micro_batch=size, accumulation=per_rank // size)
            return fullest(self.question.spec, smaller, machines.gpu).outcome == "out of memory"

        place = bisect_left(sizes, True, key=does_not_fit)
        return sizes[place] if place < len(sizes) else run.micro_batch

    # ---- further points for the picture

    def around(self, best: Estimate) -> None:
        """Add to `seen` estimates of `best` with every micro-batch, checkpointing, ZeRO stage and offload."""
        known = {candidate.run for candidate in self.seen}
        fields = {name: value for name, value in best.run.values().items() if name not in SHARED}
        per_rank = best.run.micro_batch * best.run.accumulation
        for micro_batch, checkpointing in product(divisors(per_rank), (None, "selective", "full")):
            fields.update(micro_batch=micro_batch, accumulation=per_rank // micro_batch, checkpointing=checkpointing)
            for share in self._shares_of(best.machines, best.run.dp):
                changed = {**fields, **share}
                if share["dp_replicate"] > 1 or not self._can_be(changed):
                    continue
                if not share["offload"] or self._on_host(changed, best.machines) is not None:
                    self._estimate(changed, best.machines, known)

    def _can_be(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a run with these fields is valid. An interleaved pipeline, for example, needs a multiple of pp
        micro-batches."""
        try:
            Training(**fields)
        except SpecError:
            return False
        return True


def least_memory(question: Question, run: Training, stage: int) -> int:
    state_bytes = states(question.spec, run, stage)
    return kept_weights(run, state_bytes) + state_bytes.optimizer
