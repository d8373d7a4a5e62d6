"""Settings shared by all tests: random tests take the same cases everywhere, and print how to repeat a failing one."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# deadline: a slow machine is not a failure.
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")

# Triton decides when it is first imported, by whatever test, whether it compiles or interprets: where there is no
# NVIDIA driver, the kernels' tests need the interpreter.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def one_thread():
    """Torch on one thread: tests run beside each other on few cores, and sums are in the same order every time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
