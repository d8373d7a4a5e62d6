"""The module to which a recording attributes what runs."""

import torch
from torch import nn

from llmlab.simulation.allocator.memory import HostMemory
from llmlab.simulation.engine.engine import HOST, Engine
from llmlab.simulation.profile.recording import Recording


def test_the_innermost_module_that_runs_is_the_place():
    recording, seen = Recording(Engine(HOST, HostMemory())), []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(recording.path())
            return x

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Looks()

        def forward(self, x):
            x = self.inner(x)
            seen.append(recording.path())
            return x

    with recording.watched():
        nn.Sequential(Twice(), Looks())(torch.ones(1))
    assert seen == ["0.inner", "0", "1"] and recording.path() == ""
