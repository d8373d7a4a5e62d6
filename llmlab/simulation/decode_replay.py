"""Replay of decode steps: a few steps of a long generation run, and the requests of the others are replayed.

Decode steps differ in nothing but the length of the cache. The requests of two steps in a row to the allocator are
recorded in their order; each size is then a + b · i, with i the number of the step, and the scratch of a kernel is what
its workspace function yields for the shapes of step i. The allocator sees each request of each step. Every so often a
step runs after all, and its requests must be the predicted ones; where they are not (a sliding window is full, say),
`Mispredicted` tells between which two steps all are to run.

What lives from one step to the next is the cache and the logits. During the replay the cache's tensors keep the shape
of the last step that ran, and only their addresses are right; before a step runs they get their shape.
"""

from __future__ import annotations

from itertools import count, takewhile
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.compat import disable_current_modes, tree_flatten, tree_unflatten
from ..specs.run import Inference
from ..traces.kernels import Kernel
from .engine.engine import Engine
from .engine.scratch import Scratch
from .profile.operator_log import Operators
from .workspaces.registry import Operator, Outputs

FEW = 24  # steps: a generation of as many runs them all
FIRST = 4  # steps that run at the beginning: the prompt's, and one that may be the first to use a library's handle
APART = 33  # steps, from one that runs to the next; odd, so that these are of every remainder by 2, 4, 8, 16


class Mispredicted(Exception):
    """Step `at` made other requests than were predicted; `since` was the last step before it that ran."""

    def __init__(self, since: int, at: int) -> None:
        self.since, self.at = since, at


class Request(NamedTuple):
    """One event of a step: "malloc" of `size` bytes; "free" of malloc `number`, or of tensor -1 - `number` of the cache
    before the step; "scratch" of operator `func` before its outputs, "more scratch" after them, and "free scratch", of
    the operator with this `number`."""

    kind: str
    number: int
    size: int = 0
    place: Any = None
    func: Any = None
    leaves: tuple = ()  # of the arguments and the outputs: a tensor's is an `Argument`
    form: Any = None


class Argument(NamedTuple):
    """A tensor that an operator was given."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Living(NamedTuple):
    """A tensor that lives on, in the memory of malloc `number`; `size`: bytes of its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    size: int
    dtype: torch.dtype
    number: int


class DecodeStep(NamedTuple):
    """The record of a step: its requests and operators, the tensors that live on (the cache's, then the logits), and
    the counters of the cache's layers."""

    requests: tuple[Request, ...]
    kernels: tuple[Kernel, ...]
    living: tuple[Living, ...]
    counters: tuple[tuple[tuple[str, int], ...], ...]


def steps_that_run(run: Inference, window: int | None) -> set[int]:
    """Return which calls of the model run; number 0 is the prompt's. `window`: the tokens of a sliding window."""
    new_tokens = run.new_tokens
    if new_tokens <= FEW:
        return set(range(new_tokens))
    apart = max(APART, new_tokens // 8 | 1)
    full = (window or 0) - run.prompt_len  # the step in which the window is full
    return {*range(FIRST), *range(FIRST, new_tokens, apart), *range(full - 2, full + FIRST), new_tokens - 1}


class Decoder:
    """Stands in the place of a model in `step.generate`: a call runs the model, or replays a decode step.

    `runs` are the numbers of the calls that run; others run too where nothing can be predicted.
    """

    def __init__(self, model: nn.Module, engine: Engine, operators: Operators, runs: set[int]) -> None:
        self.model, self.engine, self.operators, self.runs = model, engine, operators, runs
        self.calls = self.last_run = 0
        self.before: DecodeStep | None = None  # the last step that ran
        self.line: tuple[int, DecodeStep, DecodeStep] | None = None  # the number of a step, that step, and the next one
        self._sizes: dict[tuple, list[int]] = {}

    def __call__(self, input_ids: Tensor, past_key_values: Any, **options: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        replayed = number - self.last_run > 1
        try:
            if self.line is not None and number not in self.runs:
                return self._replay(_predicted(*self.line, number), past_key_values)
            if replayed and self.line is not None:
                self._give_shape(_predicted(*self.line, number - 1), past_key_values)
            output, step = self._run(input_ids, past_key_values, options)
        except (RuntimeError, MemoryError) as error:  # no room; or a cache that is not as the code made it
            if self.last_run == number - 1 and number in self.runs:
                raise
            raise Mispredicted(self.last_run, number) from error
        if not replayed:
            one = self.before
            self.line = (number - 1, one, step) if one and step and _alike(one, step) else None
        elif self.line is None or _predicted(*self.line, number) != step:
            raise Mispredicted(self.last_run, number)
        self.before, self.last_run = step, number
        return output

    def _run(self, input_ids: Tensor, cache: Any, options: dict[str, Any]) -> tuple[Any, DecodeStep | None]:
        """Return the model's output, and the record of the step; None where it cannot be replayed."""
        record, first, others = _Recorder(self.engine, _cached(cache)), len(self.operators), _others(cache)
        self.engine.observer = record
        try:
            output = self.model(input_ids=input_ids, past_key_values=cache, **options)
        finally:
            self.engine.observer = None
        living = tuple(map(record.living, [*_cached(cache), output.logits]))
        made = [number for number in record.alive.values() if number > 0]
        if not record.complete or sorted(each.number for each in living) != sorted(made) or _others(cache) != others:
            return output, None
        counters = tuple(_counters(layer) for layer in cache.layers)
        requests, kernels = tuple(record.requests), tuple(self.operators[first:])
        return output, DecodeStep(requests, kernels, living, counters)

    def _replay(self, step: DecodeStep, cache: Any) -> SimpleNamespace:
        """Make all requests of `step`; return an output with its logits."""
        engine, place = self.engine, self.engine.place
        cached = [engine.held(each) for each in _cached(cache)]
        addresses = {-1 - number: each.address for number, each in enumerate(cached)}
        scratch: dict[int, Scratch] = {}
        here = None
        if place is not None:
            engine.place = lambda: here
        try:
            for request in step.requests:
                kind, number, here = request.kind, request.number, request.place
                if kind == "malloc":
                    addresses[number] = engine.malloc(request.size)
                elif kind == "free":
                    engine.free(addresses[number])
                elif kind == "free scratch":
                    scratch.pop(number).free()
                else:
                    own = scratch.setdefault(number, Scratch(engine, Operator(request.func, (), {})))
                    own.take(self._sizes_of(request))
        finally:
            engine.place = place
        *others, logits = step.living
        for tensor, living in zip(cached, others, strict=True):
            tensor.address = addresses[living.number]
        if engine.watch is self.operators:
            self.operators.extend(step.kernels)
        return SimpleNamespace(logits=self._made(logits, addresses[logits.number]))

    def _sizes_of(self, request: Request) -> list[int]:
        """Return what the workspace function yields for the shapes of `request`, before its outputs or after them."""
        key = request.kind, request.func, request.leaves
        if key not in self._sizes:
            with disable_current_modes():
                leaves = [
                    torch.empty(each.shape, dtype=each.dtype, device="meta") if isinstance(each, Argument) else each
                    for each in request.leaves
                ]
                op = Operator(request.func, *tree_unflatten(leaves, request.form))
                steps = iter(self.engine.workspaces[request.func.name()](op, self.engine.gpu))
                before = list(takewhile(lambda step: not isinstance(step, Outputs), steps))
                wanted = before if request.kind == "scratch" else steps
                self._sizes[key] = [step for step in wanted if isinstance(step, int)]
        return self._sizes[key]

    def _give_shape(self, step: DecodeStep, cache: Any) -> None:
        """Let the cache be as it is after `step`."""
        living = iter(step.living)
        for layer, counters in zip(cache.layers, step.counters, strict=True):
            for name in ("keys", "values"):
                address = self.engine.forget(getattr(layer, name))
                setattr(layer, name, self._made(next(living), address))
            vars(layer).update(counters)

    def _made(self, living: Living, address: int) -> Tensor:
        """Return a fake tensor of this layout for memory that is allocated at `address`."""
        elements = living.size // living.dtype.itemsize
        with disable_current_modes(), self.engine.fake:
            made = torch.empty(elements, dtype=living.dtype, device=self.engine.device)
            made = made.as_strided(living.shape, living.stride, living.offset)
        self.engine.hold_at(made, address)
        return made


def _predicted(first: int, one: DecodeStep, other: DecodeStep, number: int) -> DecodeStep:
    """Return what step `number` does where step `first` did `one` and the next one `other`."""
    return _on_line(one, other, number - first)


def _on_line(one: Any, other: Any, steps: int) -> Any:
    """Return what grows as from `one` to `other`, `steps` times; of a tuple, each element does."""
    if one == other:
        return one
    if isinstance(one, int):
        return one + (other - one) * steps
    values = [_on_line(a, b, steps) for a, b in zip(one, other, strict=True)]
    return type(one)(*values) if hasattr(one, "_fields") else tuple(values)


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are the same but for whole numbers in them."""
    if one == other or (type(one) is int and type(other) is int):
        return True
    tuples = isinstance(one, tuple) and type(one) is type(other) and len(one) == len(other)
    return tuples and all(map(_alike, one, other))


class _Recorder:
    """Records the requests of a step to `engine`, as its observer."""

    def __init__(self, engine: Engine, cached: list[Tensor]) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        # By address: the number of a malloc that was not freed, or of what the cache held before.
        self.alive = {engine.address(each) or 0: -1 - number for number, each in enumerate(cached)}
        self.complete = True  # nothing was freed that is not known
        self._new = count(1)
        self._numbers: dict[int, int] = {}  # of operators that have scratch, by id
        self._in_scratch = False

    def living(self, tensor: Tensor) -> Living:
        """Return what is known of a tensor after the step; `number` is 0 where its memory is not known."""
        number, size = self.alive.get(self.engine.address(tensor) or 0, 0), tensor.untyped_storage().nbytes()
        return Living(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), size, tensor.dtype, number)

    def allocated(self, address: int, size: int) -> None:
        if not self._in_scratch:
            number = self.alive[address] = next(self._new)
            self.requests.append(Request("malloc", number, size, self.engine.asked))

    def freed(self, address: int) -> None:
        if self._in_scratch:
            return
        if address in self.alive:
            self.requests.append(Request("free", self.alive.pop(address)))
        else:
            self.complete = False

    def scratch_begins(self, op: Operator, freeing: bool) -> None:
        self._in_scratch = True
        if freeing:
            self.requests.append(Request("free scratch", self._numbers.pop(id(op))))
            return
        kind = "more scratch" if id(op) in self._numbers else "scratch"
        number = self._numbers.setdefault(id(op), next(self._new))
        leaves, form = tree_flatten((op.args, op.kwargs, op.out))
        shapes = tuple(Argument(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        place = self.engine.place() if self.engine.place else None
        self.requests.append(Request(kind, number, 0, place, op.func, shapes, form))

    def scratch_ends(self) -> None:
        self._in_scratch = False


def _cached(cache: Any) -> list[Tensor]:
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return [each for each in tensors if isinstance(each, Tensor)]


def _others(cache: Any) -> list[int]:
    """Return which tensors the cache has besides keys and values: a replay cannot change these."""
    held = (item for layer in cache.layers for item in vars(layer).items())
    return [id(value) for name, value in held if isinstance(value, Tensor) and name not in ("keys", "values")]


def _counters(layer: Any) -> tuple[tuple[str, int], ...]:
    return tuple((name, value) for name, value in sorted(vars(layer).items()) if type(value) is int)
