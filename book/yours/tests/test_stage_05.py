"""Stage 5, FLOPs and time: your predictions of seconds."""

from yours import time, trainer

from llmlab.notebook.exercises import time as facts
from llmlab.notebook.quiz import broken


def test_step_time():
    assert broken(time.step_time, facts.step_time) == {}


def test_active():
    assert broken(time.active, facts.active) == {}
