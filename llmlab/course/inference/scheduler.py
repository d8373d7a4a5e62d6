"""Continuous batching: requests join and leave the batch between two tokens (Orca, Yu et al. 2022).

Each step reads prompts of new requests, at most `chunk` prompt tokens (Sarathi, Agrawal et al. 2023), and one token of
every other request in one batch. When no block is free, the request that joined last is preempted: its blocks are
freed, and its tokens are read again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import nn

from ...base.errors import SpecError
from .blocks import BlockPool, CacheFull, Table
from .cache import PagedCache
from .forward import check_prompt, logits
from .sampling import Filters, next_token, probabilities, random_source

BATCHING = ("static", "continuous")


@dataclass(eq=False)
class Request:
    """A prompt and the tokens generated after it (`output`). Times are in seconds of `time.perf_counter`.

    `state` is "waiting", "running", "finished" or "cancelled"; `preempted` counts how often it lost its blocks.
    """

    prompt: list[int]
    max_new_tokens: int
    filters: Filters
    generator: torch.Generator | None
    arrived: float
    stop: int | None = None
    output: list[int] = field(default_factory=list)
    state: str = "waiting"
    first_token: float | None = None
    finished: float | None = None
    preempted: int = 0
    table: Table | None = field(default=None, repr=False)

    @property
    def own_table(self) -> Table:
        """The block table of a running request; other requests have none."""
        assert self.table is not None, f"a request that is {self.state} has no blocks"
        return self.table

    @property
    def unread(self) -> list[int]:
        """The tokens of the request that are not in the cache yet."""
        return (self.prompt + self.output)[len(self.table.tokens) if self.table else 0 :]


class Scheduler:
    """Runs requests of any length together on one model.

    All keys and values are in `blocks` blocks of `block_size` tokens; at most `max_batch` requests run at once; `chunk`
    is the most prompt tokens that a step reads (None: whole prompts). With `batching` "static" new requests join only
    when the whole batch before them has finished. `steps` and `passes` count the steps and the model's forward passes:
    a step makes one pass for all requests that are past their prompt, and one more for each prompt that it reads; a
    real engine packs them all into one pass.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: int = 256,
        block_size: int = 16,
        max_batch: int = 8,
        chunk: int | None = None,
        batching: str = "continuous",
    ) -> None:
        if max_batch < 1 or (chunk is not None and chunk < 1):
            raise SpecError(f"max_batch={max_batch}, chunk={chunk}: give 1 or more (chunk: or None for whole prompts)")
        if batching not in BATCHING:
            raise SpecError(f"batching={batching!r}: give one of {', '.join(map(repr, BATCHING))}")
        self.model, self.max_batch, self.chunk, self.batching = model, max_batch, chunk, batching
        self.steps = self.passes = 0
        self.pool = BlockPool(blocks, block_size)
        self.cache = PagedCache(self.pool)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: int | None = None,
    ) -> Request:
        """Queue a prompt and return its Request. `stop` is the token that ends it; the rest is as in `generate`.

        Raises SpecError as `generate` does, and for a request that needs more blocks than there are.
        """
        prompt = [int(token) for token in prompt]
        check_prompt(self.model, prompt, max_new_tokens)
        filters: Filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        probabilities(torch.zeros(1, 2), **filters)  # raises for a wrong value now, not in the middle of a batch
        needed, blocks = self.pool.needed(len(prompt) + max_new_tokens), len(self.pool.holders)
        if needed > blocks:
            raise SpecError(
                f"{len(prompt)} + {max_new_tokens} tokens need {needed} blocks of {self.pool.size}, the cache has "
                f"{blocks}: give a shorter request or more blocks"
            )
        generator = random_source(temperature, seed, self._device())
        request = Request(prompt, max_new_tokens, filters, generator, perf_counter(), stop)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Cancel a request that is waiting or running and free its blocks; one that has ended stays as it is."""
        if request.state in ("waiting", "running"):
            self._end(request, "cancelled")

    def step(self) -> list[Request]:
        """Read prompts, and one token of each request that is past its prompt. Returns the requests that finished."""
        if self.batching == "continuous" or not self.running:
            self._admit()
        self.steps += 1
        finished = self._read([r for r in self.running if len(r.unread) == 1])
        return finished + self._prefill([r for r in self.running if len(r.unread) > 1])

    def run(self) -> list[Request]:
        """Call `step` until no request waits or runs; return the requests in the order in which they finished."""
        finished = []
        while self.waiting or self.running:
            finished += self.step()
        return finished

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            tokens = request.prompt + request.output
            if self.running and self.pool.needed(len(tokens) + 1) > len(self.pool.free):
                return  # in order of arrival, else short requests could overtake a long one for ever
            request.table, request.state = self.pool.start(tokens), "running"
            self.running.append(self.waiting.popleft())

    def _prefill(self, requests: list[Request]) -> list[Request]:
        budget, finished = self.chunk, []
        for request in requests:
            if request.state == "running" and budget != 0:
                read = len(request.unread[:budget])
                finished += self._read([request], budget)
                budget = None if budget is None else budget - read
        return finished

    @torch.no_grad()
    def _read(self, batch: list[Request], most: int | None = None) -> list[Request]:
        """Read `most` tokens of each request (None: all), and generate a token after each prompt that is complete.

        All requests of a batch have the same number of unread tokens.
        """
        while batch:
            self.cache.rows = [request.own_table for request in batch]
            unread_BT = torch.tensor([request.unread[:most] for request in batch], device=self._device())
            self.passes += 1
            try:
                logits_B1V = logits(self.model, unread_BT, self.cache)
                break
            except CacheFull:
                self._preempt(self.running[-1])
                batch = [request for request in batch if request.state == "running"]
            except RuntimeError:
                self.cache.undo()  # the model failed: not all keys and values were written
                raise
        else:
            return []
        self.cache.written()
        time_of_tokens, finished = perf_counter(), []
        for request, row in zip(batch, logits_B1V, strict=True):
            if request.unread:
                continue  # the next step reads more of its prompt
            request.output.append(int(next_token(probabilities(row, **request.filters), request.generator)))
            request.first_token = request.first_token or time_of_tokens
            if len(request.output) == request.max_new_tokens or request.output[-1] == request.stop:
                self._end(request, "finished")
                finished.append(request)
        return finished

    def _preempt(self, request: Request) -> None:
        self.pool.release(request.own_table)
        self.running.remove(request)
        request.state, request.table, request.preempted = "waiting", None, request.preempted + 1
        self.waiting.appendleft(request)

    def _end(self, request: Request, state: str) -> None:
        if request.table is not None:
            self.pool.release(request.table)
        (self.waiting if request.state == "waiting" else self.running).remove(request)
        request.state, request.table, request.finished = state, None, perf_counter()

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device
