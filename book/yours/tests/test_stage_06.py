"""Stage 6, Gradient accumulation: several micro-batches make one update."""

import torch
from helpers import error, moved, padded, plain_gradient, texts
from yours import trainer

from llmlab.notebook.exercises import trainer as facts
from llmlab.notebook.quiz import broken


def test_accumulate():
    assert broken(trainer.accumulate, facts.accumulate) == {}


def test_split():
    assert broken(trainer.split, facts.split) == {}


def test_micro_batches_hold_all_sequences_and_no_more_than_the_room():
    batches = trainer.micro_batches(texts(), room=128)
    assert max(ids.numel() for ids, _ in batches) <= 128
    held = [row[row != -100] for _, labels in batches for row in labels]
    assert len(held) == len(texts()) and all(map(torch.equal, held, texts()))


def test_accumulated_gradients_are_those_of_one_batch():
    parts = [padded(texts()[n : n + 3]) for n in (0, 3, 6)]
    off = error(moved(parts), plain_gradient(texts()))
    assert off < 1e-3


def test_clipping_sees_the_sum_of_all_micro_batches():
    parts = [padded(texts()[n : n + 3]) for n in (0, 3, 6)]
    for options in ({}, {"dtype": torch.float16, "scaler": torch.amp.GradScaler("cpu")}):
        norm = moved(parts, limit=0.01, **options).norm().item()
        assert abs(norm - 0.01) < 1e-4


def test_collate():
    assert broken(trainer.collate, facts.collate) == {}


def test_pack():
    assert broken(trainer.pack, facts.pack) == {}
