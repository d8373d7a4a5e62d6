"""Stage 3, How we predict: your readings of the allocator."""

from yours import memory

from llmlab.notebook.exercises import memory as facts
from llmlab.notebook.quiz import broken


def test_largest_request():
    assert broken(memory.largest_request, facts.largest_request) == {}


def test_allocated_at_end():
    assert broken(memory.allocated_at_end, facts.allocated_at_end) == {}
