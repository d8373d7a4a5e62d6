"""The scratch of a kernel."""

import pytest
import torch

from llmlab.simulation.allocator.memory import HostMemory
from llmlab.simulation.engine.engine import HOST, Engine
from llmlab.simulation.workspaces.registry import OUTPUTS


def test_a_kernel_that_finds_no_room_gives_its_scratch_back_in_any_engine():
    class Full(HostMemory):
        def malloc(self, size: int, stream: int = 0) -> int:
            if self.allocated + size > 4096:
                raise MemoryError
            return super().malloc(size)

    engine = Engine(HOST, Full(), workspaces={"aten::sin": lambda op, gpu: (1024, 1024, OUTPUTS, 512, 4096)})
    with engine:
        x = torch.empty(8)
        with pytest.raises(MemoryError):
            x.sin()
        assert engine.memory.allocated == 32
