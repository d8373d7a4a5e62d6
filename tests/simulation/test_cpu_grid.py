"""The simulated CPU against the measured one: a few of the steps that benchmarks/agreement/cpu_grid.py compares."""

import pytest

import llmlab as lab
from llmlab.specs.run import QUANTIZATIONS

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


from benchmarks.agreement.cpu_grid import ADAPTERS, BAR, error

TRAININGS = [  # model, precision, optimizer, checkpointing, and what else
    ("gpt2", "fp32", "adamw", None, {}),
    ("gpt2", "fp32", "lion", "selective", {}),
    ("gpt2", "bf16", "adamw-8bit", "full", {"lora": True}),
    ("gpt2", "mixed-bf16", "adamw-8bit", None, {}),
    ("gpt2", "mixed-bf16", "sgd", "selective", {"accumulation": 2}),
    ("gpt2", "autocast-bf16", "sgd", "full", {"accumulation": 2, "attention": "eager"}),  # tied weights' gradients
    ("llama", "fp32", "adafactor", "selective", {}),
    ("llama", "bf16", "adamw-8bit", "full", {"accumulation": 2}),
    ("llama", "bf16", "lion", "full", {"lora": True}),
    ("llama", "autocast-bf16", "lion", "selective", {}),
    ("llama", "autocast-bf16", "adafactor", "full", {"accumulation": 2}),
    ("llama", "mixed-bf16", "lion", None, {"attention": "eager"}),
]
# model, weights, prompt_len, new_tokens
INFERENCES = [
    ("gpt2", "fp32", 8, 24),
    ("gpt2", "bf16", 8, 4),  # the peak is in a product for which oneDNN lays out the weight anew
    ("gpt2", "int8", 64, 4),
    ("llama", "bf16", 64, 4),
    ("llama", "nf4", 8, 4),  # the peak is where a weight is quantized
    ("llama", "int8", 8, 4),
]


@pytest.mark.parametrize(("name", "precision", "optimizer", "checkpointing", "more"), TRAININGS, ids=str)
def test_a_training_step_on_the_cpu_takes_what_is_simulated(name, precision, optimizer, checkpointing, more):
    more = {**more, "lora": ADAPTERS[name]} if more.get("lora") else more
    run = lab.Training(2, 64, precision, optimizer, checkpointing, **more)
    assert abs(error(name, run)) <= BAR


@pytest.mark.parametrize(("name", "weights", "prompt_len", "new_tokens"), INFERENCES, ids=str)
def test_generation_on_the_cpu_takes_what_is_simulated(name, weights, prompt_len, new_tokens):
    cache = "bf16" if weights in QUANTIZATIONS else weights
    assert abs(error(name, lab.Inference(2, prompt_len, new_tokens, weights, kv=cache))) <= BAR
