"""An accumulated gradient equals that of one big batch; that of the usual loop differs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.course.job import GPU, job
from llmlab.course.job import MODEL as MODEL_OF_THE_JOB
from llmlab.course.techniques.accumulation import (
    IGNORE,
    backward_exact,
    backward_of_means,
    count_targets,
    difference,
    gradient,
    groups,
    pad,
    summed_loss,
    train,
)
from llmlab.formulas.time.efficiency import efficiency

VOCAB = 64
CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB,
          "max_position_embeddings": 64}  # fmt: skip
FP32 = 2e-5  # of the gradient's norm: sums of a few hundred fp32 numbers in another order, at 2^-24 each


def new_model(**changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG, **changes))


MODEL = new_model()


def sequences(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]


def big_batch(rows):
    """The gradient of all `rows` as one padded batch, by the model's own loss: transformers', not ours."""
    ids, labels = pad(rows)
    MODEL.zero_grad(set_to_none=True)
    loss = MODEL(input_ids=ids, labels=labels).loss
    loss.backward()
    return gradient(MODEL), loss.item()


def cut(rows, micro_batch):
    return [pad(rows[i : i + micro_batch]) for i in range(0, len(rows), micro_batch)]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(2, 24), min_size=1, max_size=9), micro_batch=st.integers(1, 4))
def test_the_accumulated_gradient_is_the_big_batchs_for_any_lengths_and_any_cut(lengths, micro_batch):
    rows = sequences(lengths)
    whole, whole_loss = big_batch(rows)
    loss = backward_exact(MODEL, cut(rows, micro_batch))
    assert difference(gradient(MODEL), whole) < FP32
    assert loss == pytest.approx(whole_loss, rel=1e-5)


def test_the_usual_loop_is_right_only_for_full_groups_of_equal_lengths():
    equal, unequal = sequences([12] * 8), sequences([2, 24, 3, 20, 2, 24, 3, 20])
    whole, _ = big_batch(equal)
    backward_of_means(MODEL, cut(equal, 2), steps=4)
    assert difference(gradient(MODEL), whole) < FP32

    backward_of_means(MODEL, cut(equal[:4], 2), steps=4)  # a last group of two micro-batches where four were meant
    short = gradient(MODEL)
    right, _ = big_batch(equal[:4])
    assert difference(2 * short, right) < FP32  # half the gradient: half the learning rate, under SGD

    whole, _ = big_batch(unequal)
    loss = backward_of_means(MODEL, cut(unequal, 1), steps=8)
    assert difference(gradient(MODEL), whole) > 0.3
    tokens = [count_targets(labels) for _, labels in cut(unequal, 1)]
    with torch.no_grad():
        means = [summed_loss(MODEL, *one).item() / n for one, n in zip(cut(unequal, 1), tokens, strict=True)]
    assert loss == pytest.approx(sum(means) / 8, rel=1e-5)  # a mean of means: a token of a short sequence weighs more


def test_masked_prompts_count_no_target_and_the_first_token_has_no_past():
    ids, labels = pad(sequences([5, 3]))
    assert labels.tolist()[1][3:] == [IGNORE, IGNORE] and ids.tolist()[1][3:] == [0, 0]
    assert count_targets(labels) == 4 + 2
    labels[0, :3] = IGNORE
    assert count_targets(labels) == 2 + 2


def test_groups_keep_every_batch_and_the_last_is_short():
    assert [len(group) for group in groups(range(10), 4)] == [4, 4, 2]
    assert list(groups([], 3)) == []
    with pytest.raises(SpecError, match="steps=0 is not a whole number >= 1"):
        list(groups([1], 0))


def test_training_with_accumulation_ends_where_the_big_batch_ends():
    rows = sequences([3, 20, 7, 12, 9, 24, 2, 15, 6, 18])
    plain, accumulated = new_model(), new_model()
    losses = []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for ids, labels in cut(rows, 4):  # three steps: of 4, 4 and 2 sequences
        optimizer.zero_grad()
        loss = plain(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert train(accumulated, torch.optim.SGD(accumulated.parameters(), lr=0.5), cut(rows, 1), 4) == pytest.approx(
        losses, rel=1e-5
    )
    start, one, other = (
        torch.cat([p.detach().flatten() for p in each.parameters()]) for each in (new_model(), plain, accumulated)
    )
    assert difference(other - start, one - start) < 10 * FP32


# ---- the running job of the book, by the chapter's formulas


def peak_by_hand(spec, sequences, length, micro_batches):
    h, f, V, N = spec.hidden, spec.intermediate, spec.vocab, spec.parameters
    a_token = spec.layers * (6 * spec.heads * length + 8 * f + 34 * h) + 10 * h + 14 * V
    return 14 * N + sequences * length * a_token + (4 * N if micro_batches > 1 else 0)


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_the_chapters_formula_is_the_estimated_peak_but_for_the_workspace(micro_batch, accumulation):
    run = replace(job("04-precision"), micro_batch=micro_batch, accumulation=accumulation)
    report = lab.estimate(MODEL_OF_THE_JOB, run, GPU)
    by_hand = peak_by_hand(lab.model(MODEL_OF_THE_JOB), micro_batch, run.seq_len, accumulation)
    assert report.peak_allocated - by_hand == pytest.approx(report.parts["workspace"], abs=2**24)


def test_the_time_that_accumulation_adds_is_that_of_casting_and_adding_gradients():
    one, four = (lab.estimate(MODEL_OF_THE_JOB, job(chapter), GPU) for chapter in ("04-precision", "06-accumulation"))
    spec, bandwidth = lab.model(MODEL_OF_THE_JOB), efficiency(GPU).bandwidth
    # The estimate counts no casts of the head, and no second gradient of a tied embedding.
    moved = 24 * spec.parameters - 12 * spec.vocab * spec.hidden
    assert four.step_seconds - one.step_seconds == pytest.approx(3 * moved / bandwidth, rel=0.05)


def test_halving_a_batch_of_short_sequences_raises_the_peak():
    one, two = (
        lab.estimate(MODEL_OF_THE_JOB, replace(job("04-precision"), micro_batch=b, seq_len=128, accumulation=m), GPU)
        for b, m in ((16, 1), (8, 2))
    )
    assert two.peak_allocated > one.peak_allocated
