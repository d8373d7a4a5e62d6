"""The operators of a block that formulas count, beside the simulator's log of the real classes."""

from collections import Counter
from dataclasses import replace

import pytest

import llmlab as lab
from llmlab import LoRA, Training
from llmlab.formulas.time.host import ADAPTER, ADAPTER_AGAIN, Operators, operators
from llmlab.simulation.profile import operator_log

LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "vocab_size": 512, "n_positions": 512}
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RUN = Training(seq_len=64, precision="mixed-bf16")


def counted(monkeypatch, model, run):
    """Return the operators that two more blocks add, of one block."""
    logs, made = [], operator_log.Operators.__init__

    def kept(self, gpu=None):
        made(self, gpu)
        logs.append(self)

    monkeypatch.setattr(operator_log.Operators, "__init__", kept)
    counts = []
    for layers in (2, 4):
        logs.clear()
        name = "n_layer" if model["model_type"] == "gpt2" else "num_hidden_layers"
        lab.simulate({**model, name: layers}, run, "A100-80GB")
        counts.append(Counter((bool(k.backward), k.kind == "none") for k in max(logs, key=len)))
    few, many = counts
    return Operators(*((many[key] - few[key]) / 2 for key in
                       ((False, False), (False, True), (True, False), (True, True))))  # fmt: skip


@pytest.mark.parametrize("checkpointing", [None, "full", "selective"])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=lambda model: model["model_type"])
def test_blocks_of_transformers(monkeypatch, model, checkpointing):
    run = replace(RUN, checkpointing=checkpointing)
    layers = {"num_hidden_layers": 2} if model is LLAMA else {"n_layer": 2}
    assert counted(monkeypatch, model, run) == operators(lab.model({**model, **layers}), run)


@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_adapters(monkeypatch, checkpointing):
    run = replace(RUN, checkpointing=checkpointing, lora=LoRA(rank=4, targets=NAMES))
    each = ADAPTER if checkpointing is None else ADAPTER.plus(ADAPTER_AGAIN[checkpointing])
    block = operators(lab.model({**LLAMA, "num_hidden_layers": 2}), run)
    found = counted(monkeypatch, LLAMA, run)
    assert found == pytest.approx([mine + len(NAMES) * more for mine, more in zip(block, each, strict=True)])


def test_deepspeed_adds_views(monkeypatch):
    pytest.importorskip("deepspeed")
    run = replace(RUN, dp=8, zero=3, stack="deepspeed")
    model = {**LLAMA, "hidden_size": 512, "intermediate_size": 1376}  # smaller weights would stay whole
    assert counted(monkeypatch, model, run) == operators(lab.model({**model, "num_hidden_layers": 2}), run)


def test_torchtitan(monkeypatch):
    pytest.importorskip("torchtitan")
    run = replace(RUN, dp=8, zero=3, stack="torchtitan:ac=none")
    assert counted(monkeypatch, LLAMA, run) == operators(lab.model({**LLAMA, "num_hidden_layers": 2}), run)
