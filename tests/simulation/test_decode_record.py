"""The record of a decode step, and the steps that follow from two of them."""

import torch

from llmlab.simulation.allocator.caching import Allocator
from llmlab.simulation.decode_record import Argument, Living, Request, StepRecorder, alike, on_line
from llmlab.simulation.devices import GPU_DEVICE
from llmlab.simulation.engine.engine import Engine
from llmlab.simulation.workspaces.registry import OUTPUTS


def test_later_steps_lie_on_the_line_through_two():
    """A cache grows by as many bytes in each step; what is no number is the same in all of them."""
    first, second = (Living((2, 100 + n), (1, 2), 0, 400 + 4 * n, torch.float16, 3) for n in (0, 1))
    assert on_line(first, second, 0) == first and on_line(first, second, 1) == second
    assert on_line(first, second, 7) == Living((2, 107), (1, 2), 0, 428, torch.float16, 3)


def test_steps_are_alike_if_they_differ_in_whole_numbers_alone():
    assert alike(Request("malloc", 1, 512, "mm"), Request("malloc", 2, 1024, "mm"))
    assert not alike(Request("malloc", 1), Request("free", 1))
    assert not alike((1, 2), (1, 2, 3)) and not alike((1,), [1])


def test_a_step_is_recorded_by_the_numbers_of_its_blocks():
    """The cache's tensor 0 is block -1, blocks of the step count from 1, and scratch stands between them."""
    engine = Engine(GPU_DEVICE, Allocator(), workspaces={"aten::sin": lambda op, gpu: (1024, OUTPUTS, 512)})
    with engine:
        cached = torch.empty(8, device=GPU_DEVICE)
        recorder = engine.observer = StepRecorder(engine, [cached])
        out = cached.sin()
        del cached
        assert recorder.living(out) == Living((8,), (1,), 0, 32, torch.float32, 2)
        assert recorder.living(torch.empty(4)).number == 0 and recorder.complete
    kinds = [(each.kind, each.number) for each in recorder.requests]
    assert kinds == [("scratch", 1), ("malloc", 2), ("more scratch", 1), ("free scratch", 1), ("free", -1)]
    assert Argument((8,), torch.float32) in recorder.requests[0].leaves
