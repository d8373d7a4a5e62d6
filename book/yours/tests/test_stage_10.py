"""Stage 10, FlashAttention: the end of part one, where everything works together."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import V, error, moved, plain_gradient, small_gpt, small_llama, texts
from yours import attention, formats, time, trainer

from llmlab.data import split, windows
from llmlab.notebook.exercises import attention as facts
from llmlab.notebook.exercises import formats as format_facts
from llmlab.notebook.exercises import time as time_facts
from llmlab.notebook.quiz import broken


def test_merge():
    assert broken(attention.merge, facts.merge) == {}


def test_tiles_computed():
    assert broken(attention.tiles_computed, facts.tiles_computed) == {}


def with_fused_attention(model):
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = partial(F.scaled_dot_product_attention, is_causal=True)
    return model


def everything():
    return {
        "dtype": torch.float16,
        "scaler": torch.amp.GradScaler("cpu"),
        "checkpointed": 4,
        "chunk": trainer.largest_chunk(128, V, room=2**16),
    }


@pytest.mark.parametrize("make", [small_gpt, small_llama])
def test_everything_together_gives_the_gradients_of_the_plain_trainer(make):
    batches = trainer.micro_batches(texts(), room=128)
    gradient = moved(batches, with_fused_attention(make()), **everything())
    off = error(gradient, plain_gradient(texts(), make()))
    assert off < 0.03


def test_your_trainer_trains_your_gpt():
    steps, (training, validation) = 30, split(vocab=V)
    updates = [trainer.micro_batches(list(windows(training, 4, 64, seed)), room=128) for seed in range(steps)]
    model = with_fused_attention(small_gpt())
    adamw = torch.optim.AdamW(trainer.parameter_groups(model, 0.1), lr=1e-2)
    schedule = partial(trainer.factor, warmup=4, decay=14, total=steps)
    trainer.train(model, adamw, updates, schedule, limit=1.0, **everything())
    ids = windows(validation, 16, 64)
    with torch.no_grad():
        held_out = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert held_out < math.log(V) - 0.8  # better than guessing


def test_blockwise():
    assert broken(formats.blockwise, format_facts.blockwise) == {}


def test_delayed():
    assert broken(formats.delayed, format_facts.delayed) == {}


def test_gaps():
    assert broken(time.gaps, time_facts.gaps) == {}


def test_share_of():
    assert broken(time.share_of, time_facts.share_of) == {}
