"""Stage 4, Precision: the trainer runs its matmuls in 16 bits, and scales the loss."""

import pytest
import torch
from helpers import error, moved, padded, plain_gradient, texts
from yours import formats, trainer

from llmlab.notebook.exercises import formats as format_facts
from llmlab.notebook.exercises import trainer as facts
from llmlab.notebook.quiz import broken


def test_decoded():
    assert broken(formats.decoded, format_facts.decoded) == {}


def test_amp_update():
    assert broken(trainer.amp_update, facts.amp_update) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_gradients_by_rounding_alone(dtype):
    scaler = torch.amp.GradScaler("cpu") if dtype is torch.float16 else None
    off = error(moved([padded(texts())], dtype=dtype, scaler=scaler), plain_gradient(texts()))
    assert 0 < off < 0.03


def test_clipping_sees_the_true_gradients():
    scaler = torch.amp.GradScaler("cpu")
    norm = moved([padded(texts())], limit=0.01, dtype=torch.float16, scaler=scaler).norm().item()
    assert abs(norm - 0.01) < 1e-4


def test_an_overflow_changes_no_weight_and_halves_the_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    assert not moved([padded(texts())], dtype=torch.float16, scaler=scaler).any()
    assert scaler.get_scale() == 2.0**39
