"""Which of a decode step's requests to the allocator are skipped when the step is played back."""

import pytest
import torch

from llmlab.base.units import KiB, MiB
from llmlab.simulation.allocator.caching import Allocator
from llmlab.simulation.decode_record import DecodeStep, Living, Request
from llmlab.simulation.decode_requests import Replayer
from llmlab.simulation.devices import HOST
from llmlab.simulation.engine.engine import Engine


@pytest.mark.parametrize("size", [512 * KiB, 1 * MiB])
def test_requests_that_need_new_segments_are_not_skipped(size):
    """A step keeps 24 small blocks until it ends. Blocks of 1 MiB fill each segment, so the free blocks are the same
    before every other request, although each of these needs a new segment."""
    allocator = Allocator(2**34)
    allocator.free(allocator.malloc(512))  # as a step finds it that others preceded
    numbers = range(1, 25)
    requests = [*[Request("malloc", number, size) for number in numbers], *[Request("free", each) for each in numbers]]
    logits = Living((2 * MiB,), (1,), 0, 4 * MiB, torch.float16, 25)
    step = DecodeStep((*requests, Request("malloc", 25, 4 * MiB)), (), (logits,), ())
    Replayer(Engine(HOST, allocator), step, step).replay(1, [])
    assert allocator.statistics.small_pool.reserved_bytes.peak == 24 * size


def test_what_a_later_step_leaves_lies_on_the_line_through_the_first_two():
    """A cache of 4 bytes per token grows by a token in each step; the logits stay as they are."""
    logits = Living((16,), (1,), 0, 64, torch.float32, 2)
    caches = [Living((1, tokens), (tokens, 1), 0, 4 * tokens, torch.float32, 1) for tokens in (100, 101)]
    one, other = (
        DecodeStep((Request("malloc", 1, cache.size), Request("malloc", 2, 64)), (), (cache, logits), ())
        for cache in caches
    )
    allocator = Allocator(2**34)
    replayer = Replayer(Engine(HOST, allocator), one, other)
    assert replayer.logits(0) == replayer.logits(50) == logits
    replayer.replay(50, [])
    assert allocator.statistics.small_pool.requested_bytes.current == 4 * 150 + 64
    ends = [step._replace(living=step.living[:1]) for step in (one, other)]
    assert Replayer(Engine(HOST, Allocator()), *ends).logits(3).shape == (1, 103)
