"""Stage 8, Activation checkpointing: some blocks run twice, and no gradient changes."""

import torch
from helpers import moved, padded, small_gpt, texts
from yours import trainer

from llmlab.notebook.exercises import trainer as facts
from llmlab.notebook.quiz import broken


def test_first_blocks():
    assert broken(trainer.first_blocks, facts.first_blocks) == {}


def test_by_hooks_early():
    assert broken(trainer.by_hooks_early, facts.by_hooks_early) == {}


def test_checkpointed_blocks_run_twice_and_change_no_gradient():
    model, runs = small_gpt(), []
    for number, block in enumerate(model.h):
        block.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
    parts = [padded(texts())]
    assert torch.equal(moved(parts, model, checkpointed=3), moved(parts))
    assert sorted(runs) == [0, 0, 1, 1, 2, 2, 3]
