"""Stage 7, Optimizers and Learning rates: decay, a schedule, and a run."""

from functools import partial

import torch
from helpers import padded, small_gpt, texts
from yours import optimizer, trainer

from llmlab.notebook.exercises import optimizer as optimizer_facts
from llmlab.notebook.exercises import trainer as facts
from llmlab.notebook.quiz import broken


def test_parameter_groups():
    assert broken(trainer.parameter_groups, facts.parameter_groups) == {}


def test_factored_step():
    assert broken(optimizer.factored_step, optimizer_facts.factored_step) == {}


def test_factor():
    assert broken(trainer.factor, facts.factor) == {}


def test_scaled_update():
    assert broken(trainer.scaled_update, facts.scaled_update) == {}


def test_a_run_learns_its_texts_and_ends_with_the_rate_of_the_schedule():
    model, steps = small_gpt(), 30
    adamw = torch.optim.AdamW(trainer.parameter_groups(model, 0.1), lr=1e-2)
    schedule = partial(trainer.factor, warmup=5, decay=10, total=steps)
    losses = trainer.train(model, adamw, [[padded(texts())]] * steps, schedule, limit=1.0)
    assert losses[-1] < losses[0] - 2
    assert all(abs(group["lr"] - 1e-2 * schedule(steps - 1)) < 1e-9 for group in adamw.param_groups)


def test_scaled_groups():
    assert broken(trainer.scaled_groups, facts.scaled_groups) == {}


def test_noise_scale_of():
    assert broken(trainer.noise_scale_of, facts.noise_scale_of) == {}


def test_take_step():
    assert broken(trainer.take_step, facts.take_step) == {}
