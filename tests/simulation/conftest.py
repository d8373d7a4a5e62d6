import pytest

from llmlab.simulation.simulator import simulator


@pytest.fixture
def card():
    with simulator("A100-40GB") as sim:
        yield sim
