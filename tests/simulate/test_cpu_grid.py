"""The simulated CPU against the measured one, over what Training and Inference can say: within a thousandth.

One thing is not simulated and left out here: oneDNN's bf16 products take scratch memory, as much as its kernels for the
CPU at hand want (on one with AMX up to 0.6 MiB in these tiny models). It shows where such a product is the peak, as
where a tiny model generates in bf16 from a short prompt; with oneDNN off, the figures are equal there too.
"""

from __future__ import annotations

import pytest

import llmlab as lab

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

GPT = {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 256, "vocab_size": 2000}
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 344, "vocab_size": 2000,
         "max_position_embeddings": 256}  # fmt: skip
ADAPTERS = {"gpt2": lab.LoRA(rank=8, targets=("c_attn",), dropout=0.1),
            "llama": lab.LoRA(rank=8, targets=("q_proj", "v_proj"), dropout=0.1)}  # fmt: skip

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


def config(name: str) -> dict:
    return GPT if name == "gpt2" else LLAMA


def error(name: str, run: lab.Training | lab.Inference) -> float:
    """How far the simulated peak is from the measured one, as a part of it."""
    measured = lab.measure(config(name), run, "cpu", repeats=1).peak_allocated
    return lab.simulate(config(name), run, "cpu").peak_allocated / measured - 1


@pytest.mark.parametrize(("name", "precision", "optimizer", "checkpointing", "more"), TRAININGS, ids=str)
def test_a_training_step_on_the_cpu_takes_what_is_simulated(name, precision, optimizer, checkpointing, more):
    more = {**more, "lora": ADAPTERS[name]} if more.get("lora") else more
    run = lab.Training(2, 64, precision, optimizer, checkpointing, **more)
    assert abs(error(name, run)) <= 0.001


@pytest.mark.parametrize(("name", "weights", "prompt_len", "new_tokens"), INFERENCES, ids=str)
def test_generation_on_the_cpu_takes_what_is_simulated(name, weights, prompt_len, new_tokens):
    assert abs(error(name, lab.Inference(2, prompt_len, new_tokens, weights, kv=weights))) <= 0.001
