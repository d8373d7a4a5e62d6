"""Which numbers of a training step fp16 and bf16 can hold, and which dtypes Transformers' Trainer trains in."""

import math

import pytest
import torch

from llmlab.course.experiments.precision import SIZES, VOCAB, numbers_of_a_step, warmed_up_llama
from llmlab.data import batch


@pytest.fixture(scope="module")
def model():
    return warmed_up_llama()


@pytest.fixture(scope="module")
def numbers(model):
    return numbers_of_a_step(model, batch(VOCAB, 4, 128, seed=10))


def share_of_zeros(values, dtype):
    values = values[values != 0]
    return (values.to(dtype) == 0).float().mean().item()


def test_fp16_holds_activations_and_loses_more_of_each_later_kind(numbers):
    zeros = {kind: share_of_zeros(values, torch.float16) for kind, values in numbers.items()}
    assert numbers["activations"].half().isfinite().all()
    assert zeros["activations"] < 0.001 < zeros["gradients of activations"] < 0.5 < zeros["their squares"]


def test_bf16_loses_next_to_none(numbers):
    assert all(share_of_zeros(values, torch.bfloat16) < 0.001 for values in numbers.values())


def test_more_tokens_lose_more_gradients_because_the_loss_is_their_mean(model, numbers):
    few = numbers_of_a_step(model, batch(VOCAB, 1, 32, seed=10))
    kind = "gradients of activations"
    assert share_of_zeros(few[kind], torch.float16) < share_of_zeros(numbers[kind], torch.float16)


def test_a_loss_scale_rescues_the_gradients_of_activations(numbers):
    gradients = numbers["gradients of activations"]
    zeros = [share_of_zeros(gradients * 2.0**power, torch.float16) for power in (0, 8, 16)]
    assert zeros == sorted(zeros, reverse=True)
    assert zeros[2] < 0.01 < zeros[0]


@pytest.mark.parametrize(("weights", "flag", "stored"), [
    (torch.float32, True, torch.float32),
    (torch.bfloat16, False, torch.bfloat16),
    (torch.bfloat16, True, torch.bfloat16),
])  # fmt: skip
def test_bf16_of_the_trainer_is_autocast_and_the_dtype_of_the_weights_decides_what_is_stored(
    tmp_path, weights, flag, stored
):
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    seen = {}

    class Look(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model, optimizer, **rest):
            weight = model.lm_head.weight
            seen["weight"], seen["gradient"] = weight.dtype, weight.grad.dtype
            seen["moment"] = optimizer.state[weight]["exp_avg"].dtype

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES), dtype=weights)
    computed = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: computed.append(output.dtype))
    rows = [{"input_ids": ids, "labels": ids} for ids in batch(VOCAB, 4, 32)]
    args = TrainingArguments(
        str(tmp_path), max_steps=1, bf16=flag, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    Trainer(model, args, train_dataset=rows, callbacks=[Look()]).train()
    assert set(seen.values()) == {stored}
    assert set(computed) == {torch.bfloat16}


def test_fp16_weights_do_not_survive_adamw():
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES), dtype=torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, losses = batch(VOCAB, 1, 128), []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert math.isnan(losses[-1]) or losses[-1] > losses[0]
