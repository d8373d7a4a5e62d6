import pytest
import torch

from llmlab.simulation.simulator import simulator


@pytest.fixture
def card():
    with simulator("A100-40GB") as sim:
        yield sim


@pytest.fixture(scope="module")
def no_gpu():
    if torch.cuda.is_available():
        pytest.skip("the simulated device must not be mistaken for a real one")
