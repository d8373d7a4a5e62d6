"""The error of a GPU that is full."""

import pytest
import torch

from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_above_capacity_torchs_own_error_says_so_and_a_smaller_batch_goes_on():
    with simulator("T4") as sim:
        tensor = torch.empty(13 << 30, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
            torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        message = str(caught.value)
        assert message.startswith("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56")
        assert "of which 1.42 GiB is free." in message
        assert "13.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated" in message
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        del tensor
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    assert sim.allocated == 0
