"""Operators of two dtypes on the simulated CPU: it makes the copies that the real one makes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import llmlab as lab
from llmlab.simulation.allocator.memory import HostMemory
from llmlab.simulation.engine.engine import HOST, Engine

N = 256
HALF = torch.bfloat16


def wide(*shape: int) -> Tensor:
    return torch.ones(shape)


STEPS: dict[str, Callable[[], Tensor]] = {
    "one operand is copied": lambda: wide(N, N).to(HALF) * wide(N, N),
    "the other, and broadcast after": lambda: wide(N, N) + wide(N).to(HALF),
    "the new value too": lambda: wide(N, N).to(HALF).add_(wide(N, N)),
    "into the wider one": lambda: wide(N, N).add_(wide(N, N).to(HALF)),
    "a comparison": lambda: wide(N, N) > wide(N, N).to(HALF),
    "whole numbers": lambda: wide(N, N).long() * wide(N, N),
    "three operands": lambda: torch.addcmul(wide(N, N), wide(N, N).to(HALF), wide(N, N)),
    "a number decides nothing": lambda: wide(N, N).to(HALF) * torch.ones(()),
    "a mask stays one": lambda: wide(N, N).masked_fill(wide(N, N).bool(), 0.0),
    "a choice": lambda: torch.where(wide(N, N).bool(), wide(N, N), wide(N, N)),
    "one dtype": lambda: wide(N, N) * wide(N, N),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_simulated_cpu_copies_what_the_real_one_copies(step: Callable[[], Tensor]) -> None:
    step()
    with lab.meter("cpu") as meter:
        step()
    engine, now, timeline = Engine(HOST, HostMemory(), workspaces={}), 0, []
    with engine:
        step()
    for event in engine.events:
        now += event.size
        timeline.append(now)
    large = [size >> 10 for size in meter.timeline], [size >> 10 for size in timeline]  # without numbers' few bytes
    assert max(large[0]) == max(large[1]) and sorted({*large[0]}) == sorted({*large[1]})
