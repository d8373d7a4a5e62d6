"""The chapter's loop and byte counts agree with autograd's own rules and with the measured step."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import llmlab as lab
from llmlab.course.techniques.memory_anatomy import model_states, saved_for_backward, storage_bytes, train

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64, "vocab_size": 300,
          "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(300, (2, 64), generator=generator)] * 3


def test_views_and_tied_weights_count_once(model):
    weight = torch.zeros(10, 10)
    assert storage_bytes([weight, weight.t(), weight[3], None]) == 400
    assert storage_bytes(model.parameters()) == 4 * lab.model(CONFIG).parameters


def test_adamw_holds_two_numbers_a_parameter_from_the_first_step_on(model, batches):
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    train(model, optimizer, batches[:1], after=lambda phase: seen.append((phase, model_states(model, optimizer))))
    phases = dict(seen)
    weights = phases["forward"]["weights"]
    assert phases["forward"]["gradients"] == phases["forward"]["optimizer"] == 0
    assert phases["backward"]["gradients"] == weights and phases["backward"]["optimizer"] == 0
    counters = 4 * len(list(model.parameters()))  # AdamW's step counts, a 4-byte tensor each
    assert phases["optimizer"]["optimizer"] == 2 * weights + counters


def test_the_loop_learns_the_batch(model, batches):
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches * 5)
    assert losses[-1] < 0.7 * losses[0]


def test_no_grad_keeps_nothing_and_eval_alone_keeps_all(model, batches):
    model.eval()
    with saved_for_backward(model) as kept:
        model(input_ids=batches[0], labels=batches[0])
    with saved_for_backward(model) as none, torch.no_grad():
        model(input_ids=batches[0], labels=batches[0])
    assert sum(kept.values()) > 0 and none == {}


def test_what_the_hooks_see_is_what_the_measured_step_keeps():
    """Two independent counts agree at the end of forward: autograd's hooks and the allocator's events."""
    from llmlab.data import batch
    from llmlab.step.step import build_model

    run = lab.Training(micro_batch=2, seq_len=64)
    report = lab.measure(CONFIG, run, "cpu", repeats=1)
    model = build_model(lab.model(CONFIG), run, "cpu")
    ids = batch(300, 2, 64)
    with saved_for_backward(model) as kept:
        loss = model(input_ids=ids, labels=ids).loss
    del loss
    measured = report.phases["forward"] - 3 * report.parts["weights"]  # weights and two moments are there before
    logits = 4 * 2 * 64 * 300  # in the output object, but not needed by backward
    assert sum(kept.values()) + logits == pytest.approx(measured, rel=0.02)
