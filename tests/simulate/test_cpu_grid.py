"""The simulated CPU against the measured one: a few of the steps that benchmarks/cpu_grid.py compares.

One thing is not simulated and left out here: oneDNN's bf16 products take scratch memory, as much as its kernels for the
CPU at hand want (on one with AMX up to 0.6 MiB in these tiny models). It shows where such a product is the peak, as
where a tiny model generates in bf16 from a short prompt; with oneDNN off, the figures are equal there too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import llmlab as lab

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not a package

from cpu_grid import ADAPTERS, BAR, error

TRAININGS = [  # model, precision, optimizer, checkpointing, and what else
    ("gpt2", "fp32", "adamw", None, {}),
    ("gpt2", "fp32", "lion", "selective", {}),
    ("gpt2", "bf16", "adamw-8bit", "full", {"lora": True}),
    ("gpt2", "bf16", "adamw", "full", {}),
    ("gpt2", "mixed-bf16", "adamw-8bit", None, {}),
    ("gpt2", "mixed-bf16", "sgd", "selective", {"accumulation": 2}),
    ("gpt2", "autocast-bf16", "sgd", None, {}),
    ("gpt2", "autocast-bf16", "sgd", "full", {"accumulation": 2, "attention": "eager"}),  # tied weights' gradients
    ("llama", "fp32", "adamw-8bit", "full", {}),
    ("llama", "fp32", "adafactor", "selective", {}),
    ("llama", "bf16", "adamw-8bit", "full", {"accumulation": 2}),
    ("llama", "bf16", "lion", "full", {"lora": True}),
    ("llama", "autocast-bf16", "lion", "selective", {}),
    ("llama", "autocast-bf16", "adafactor", "full", {"accumulation": 2}),
    ("llama", "mixed-bf16", "lion", None, {"attention": "eager"}),
]
INFERENCES = [("gpt2", "fp32", 8, 24), ("llama", "bf16", 64, 4)]  # model, weights, prompt_len, new_tokens


@pytest.mark.parametrize(("name", "precision", "optimizer", "checkpointing", "more"), TRAININGS, ids=str)
def test_a_training_step_on_the_cpu_takes_what_is_simulated(name, precision, optimizer, checkpointing, more):
    more = {**more, "lora": ADAPTERS[name]} if more.get("lora") else more
    run = lab.Training(2, 64, precision, optimizer, checkpointing, **more)
    assert abs(error(name, run)) <= BAR


@pytest.mark.parametrize(("name", "weights", "prompt_len", "new_tokens"), INFERENCES, ids=str)
def test_generation_on_the_cpu_takes_what_is_simulated(name, weights, prompt_len, new_tokens):
    assert abs(error(name, lab.Inference(2, prompt_len, new_tokens, weights, kv=weights))) <= BAR
