"""Replay of decode steps: a few steps of a long generation run, and the requests of the others are replayed.

Decode steps differ only in the length of the cache. The requests of two consecutive steps to the allocator are recorded
in order. In step i, each size is then a + b · i, and a kernel's workspace function yields its scratch for the shapes of
step i. Before and after each step, the allocator is exactly as if the step had run, although small requests of repeated
layers are skipped (decode_requests.py). From time to time a step runs, and its requests must equal the predicted ones.
If they differ, for example because a sliding window is full, `Mispredicted` says between which two steps all must run.

The cache and the logits live from one step to the next. During the replay, the cache's tensors keep the shape of the
last step that ran, and only their addresses are right. Before a step runs, their shapes are corrected.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..base.compat import disable_current_modes
from ..specs.run import Inference
from .decode_record import DecodeStep, Living, StepRecorder, alike, on_line
from .decode_requests import Replayed, Replayer
from .engine.engine import Engine
from .profile.operator_log import Operators

FEW = 24  # steps: a generation of at most this many runs all of them
FIRST = 4  # steps that run at the beginning: the prompt's, and one that may be the first to use a library's handle
APART = 33  # steps from one that runs to the next; odd, so that they have every remainder modulo 2, 4, 8 and 16


class Mispredicted(Exception):
    """Step `at` sent other requests than predicted, and the steps from `since` on must run: from the last step before
    it that ran, or if memory ran out, from the previous step."""

    def __init__(self, since: int, at: int) -> None:
        self.since, self.at = since, at


def steps_that_run(run: Inference, window: int | None) -> set[int]:
    """Return the numbers of the model's calls that run; 0 is the prompt's. `window`: the tokens of a sliding window."""
    new_tokens = run.new_tokens
    if new_tokens <= FEW:
        return set(range(new_tokens))
    interval = max(APART, new_tokens // 4 | 1)
    full = (window or 0) - run.prompt_len  # the step in which the window is full
    return {*range(FIRST), *range(FIRST, new_tokens, interval), *range(full - 2, full + FIRST), new_tokens - 1}


class Decoder:
    """Replaces the model in `step.generate`: a call runs the model or replays a decode step.

    `runs` are the numbers of the calls that run; others run too if nothing can be predicted.
    """

    def __init__(self, model: nn.Module, engine: Engine, operators: Operators, runs: set[int]) -> None:
        self.model, self.engine, self.operators, self.runs = model, engine, operators, runs
        self.calls, self.last_run = 0, -1
        self.before: DecodeStep | None = None  # the last step that ran
        self.line: tuple[int, DecodeStep, DecodeStep] | None = None  # the number of a step, that step, and the next one
        self.replayer: Replayer | None = None  # of the steps on this line
        self.highest: Replayed | None = None  # the replayed step with the highest peak
        self.replayed: list[Tensor] = []  # the cache after a replayed step; empty after one that ran

    def __call__(self, input_ids: Tensor, past_key_values: Any, **options: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        replayed = number - self.last_run > 1
        try:
            if self.replayer is not None and number not in self.runs:
                return self._replay(self.replayer, number, past_key_values)
            if replayed and self.line is not None:
                self._give_shape(_predicted(*self.line, number - 1), past_key_values)
            output, step = self._run(input_ids, past_key_values, options)
        except (RuntimeError, MemoryError) as error:  # out of memory, or a cache in a state that the code never created
            if self.last_run == number - 1 and number in self.runs:
                raise
            no_room = isinstance(error, (torch.OutOfMemoryError, MemoryError))
            raise Mispredicted(number - 1 if no_room else self.last_run, number) from error
        if not replayed:
            one = self.before
            self.line = (number - 1, one, step) if one and step and alike(one, step) else None
            self.replayer = Replayer(self.engine, *self.line[1:]) if self.line else None
        elif self.line is None or _predicted(*self.line, number) != step:
            raise Mispredicted(self.last_run, number)
        self.before, self.last_run, self.replayed = step, number, []
        if number == max(self.runs) and self.highest is not None:
            self.highest.add_small_events(self.engine)
        return output

    def _run(self, input_ids: Tensor, cache: Any, options: dict[str, Any]) -> tuple[Any, DecodeStep | None]:
        """Return the model's output, and the record of the step or None if it cannot be replayed."""
        record, first, other_states = StepRecorder(self.engine, _cached(cache)), len(self.operators), _others(cache)
        self.engine.observer = record
        try:
            output = self.model(input_ids=input_ids, past_key_values=cache, **options)
        finally:
            self.engine.observer = None
        living = tuple(map(record.living, [*_cached(cache), output.logits]))
        made = [number for number in record.alive.values() if number > 0]
        numbers = sorted(tensor.number for tensor in living)
        if not record.complete or numbers != sorted(made) or _others(cache) != other_states:
            return output, None
        counters = tuple(_counters(layer) for layer in cache.layers)
        requests, kernels = tuple(record.requests), tuple(self.operators[first:])
        return output, DecodeStep(requests, kernels, living, counters)

    def _replay(self, replayer: Replayer, number: int, cache: Any) -> SimpleNamespace:
        """Send the requests of step `number`, and return an output with only its logits."""
        assert self.line is not None
        cached, steps = _cached(cache), number - self.line[0]
        storages = [self.engine.storage_of(tensor) for tensor in cached]
        step = replayer.replay(steps, [storage.address for storage in storages])
        if self.highest is None or step.peak > self.highest.peak:
            self.highest = step
        *addresses, logits = step.living
        for storage, address in zip(storages, addresses, strict=True):
            storage.address = address
        if self.engine.watch is self.operators:
            self.operators.extend(replayer.kernels(steps))
        self.replayed = cached
        return SimpleNamespace(logits=self._made(replayer.logits(steps), logits))

    def _give_shape(self, step: DecodeStep, cache: Any) -> None:
        """Set the tensors and counters of the cache to their state after `step`."""
        living = iter(step.living)
        for layer, counters in zip(cache.layers, step.counters, strict=True):
            for name in ("keys", "values"):
                address = self.engine.forget(getattr(layer, name))
                setattr(layer, name, self._made(next(living), address))
            vars(layer).update(counters)

    def _made(self, living: Living, address: int) -> Tensor:
        """Return a fake tensor with the layout of `living`, whose memory is already allocated at `address`."""
        elements = living.size // living.dtype.itemsize
        with disable_current_modes(), self.engine.fake:
            made = torch.empty(elements, dtype=living.dtype, device=self.engine.device)
            made = made.as_strided(living.shape, living.stride, living.offset)
        self.engine.hold_at(made, address)
        return made


def _predicted(first: int, one: DecodeStep, other: DecodeStep, number: int) -> DecodeStep:
    """Return the record of step `number`, predicted from `one` of step `first` and `other` of the step after it."""
    return on_line(one, other, number - first)


def _cached(cache: Any) -> list[Tensor]:
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def _others(cache: Any) -> list[int]:
    """Return the ids of the cache's tensors other than keys and values. A replay cannot change these tensors."""
    attributes = (item for layer in cache.layers for item in vars(layer).items())
    return [id(value) for name, value in attributes if isinstance(value, Tensor) and name not in ("keys", "values")]


def _counters(layer: Any) -> tuple[tuple[str, int], ...]:
    return tuple((name, value) for name, value in sorted(vars(layer).items()) if type(value) is int)
