"""Stage 2, Memory anatomy: your predictions of bytes."""

from helpers import small_gpt
from yours import memory, trainer

from llmlab.notebook.exercises import memory as facts
from llmlab.notebook.exercises import trainer as trainer_facts
from llmlab.notebook.quiz import broken


def test_states():
    assert broken(memory.states, facts.states) == {}


def test_the_states_of_your_gpt_with_its_tied_head():
    model = small_gpt()
    assert memory.states(model)["weights"] == 4 * sum(weight.numel() for weight in model.parameters())


def test_peak_bytes():
    assert broken(memory.peak_bytes, facts.peak_bytes) == {}


def test_largest():
    assert broken(trainer.largest, trainer_facts.largest) == {}
