"""The compute capability of a simulated GPU."""

import pytest

from llmlab.base.errors import NotAvailable
from llmlab.hardware.gpu import gpu
from llmlab.simulation.capability import capability_of


def test_a_gpu_of_nvidia_has_one_and_others_run_no_cuda_kernels():
    assert capability_of(gpu("T4")) == (7, 5)
    with pytest.raises(NotAvailable, match="MI300X runs no CUDA kernels"):
        capability_of(gpu("MI300X"))
