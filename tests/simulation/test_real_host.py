"""Values that the simulated GPU lacks, where code writes them into a tensor of the host."""

import pytest
import torch

from llmlab.base.errors import NotAvailable
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_whole_numbers_are_not_written_to_the_host_unless_the_user_assumes_one():
    for assumed in (None, 3.0):
        with simulator("T4", assume=assumed):
            ids = torch.rand(2000, 4, device="cuda").argmax(-1)
            host = torch.zeros(2000, dtype=torch.int64)
            if assumed is None:
                with pytest.raises(NotAvailable, match="assume=1"):
                    host.copy_(ids)
            else:
                assert host.copy_(ids).unique().tolist() == [3]


def test_floats_are_written_with_a_warning_and_known_values_as_they_are():
    with simulator("T4"):
        host = torch.zeros(2000)
        with pytest.warns(UserWarning, match="a copy to the host"):
            host.copy_(torch.rand(2000, device="cuda"))
        assert host[:3].copy_(torch.arange(3, device="cuda")).tolist() == [0, 1, 2]
