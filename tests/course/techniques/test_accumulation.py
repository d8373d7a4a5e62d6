"""An accumulated gradient equals that of one big batch; the usual loop, Accelerate and the Trainer differ."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from llmlab.base.errors import SpecError
from llmlab.course.techniques.accumulation import (
    IGNORE,
    backward_exact,
    backward_of_means,
    difference,
    gradient,
    groups,
    pad,
    summed_loss,
    targets,
    train,
)

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
    tokens = [targets(labels) for _, labels in cut(unequal, 1)]
    with torch.no_grad():
        means = [summed_loss(MODEL, *one).item() / n for one, n in zip(cut(unequal, 1), tokens, strict=True)]
    assert loss == pytest.approx(sum(means) / 8, rel=1e-5)  # a mean of means: a token of a short sequence weighs more


def test_masked_prompts_count_no_target_and_the_first_token_has_no_past():
    ids, labels = pad(sequences([5, 3]))
    assert labels.tolist()[1][3:] == [IGNORE, IGNORE] and ids.tolist()[1][3:] == [0, 0]
    assert targets(labels) == 4 + 2
    labels[0, :3] = IGNORE
    assert targets(labels) == 2 + 2


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


# ---- the libraries


def accelerated(rows, steps):
    """The gradients of each optimizer step under Accelerate's accumulate(), which divides by `steps` itself."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=pad)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for ids, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=ids, labels=labels).loss)
            if accelerator.sync_gradients:
                found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)  # otherwise every later test would get this one's device
    return found


def test_accelerates_accumulate_steps_at_the_short_end_but_takes_a_mean_of_means():
    rows = sequences([12, 12, 12, 12, 12, 12])
    full, short = accelerated(rows, steps=4)  # two steps: the last group is stepped, not dropped
    assert difference(full, big_batch(rows[:4])[0]) < FP32
    assert difference(2 * short, big_batch(rows[4:])[0]) < FP32  # two of four, and still divided by four
    rows = sequences([2, 24, 3, 20])
    (unequal,) = accelerated(rows, steps=4)
    assert difference(unequal, big_batch(rows)[0]) > 0.3
    backward_of_means(MODEL, cut(rows, 1), steps=4)
    assert difference(gradient(MODEL), unequal) < FP32


def trained(rows, steps, tmp_path):
    """The gradients of each optimizer step of transformers' Trainer, and the rows in the order that it took."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    found = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **rest):
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    args = TrainingArguments(
        tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=steps, num_train_epochs=1, use_cpu=True,
        max_grad_norm=0.0, learning_rate=0.0, report_to="none", save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    order = []

    def collate(picked):
        order.extend(row["ids"] for row in picked)
        ids, labels = pad([row["ids"] for row in picked])
        return {"input_ids": ids, "labels": labels}

    data = [{"ids": row} for row in rows]
    Trainer(new_model(), args, train_dataset=data, data_collator=collate, callbacks=[Look()]).train()
    return found, order  # it shuffles


def test_the_trainer_divides_by_tokens_also_at_the_short_end(tmp_path):
    rows = sequences([2, 24, 3, 20, 5, 17])
    (full, short), taken = trained(rows, 4, tmp_path)
    assert difference(full, big_batch(taken[:4])[0]) < FP32
    assert difference(short, big_batch(taken[4:])[0]) < FP32
