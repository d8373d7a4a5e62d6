"""Linear layers whose weights are quantized."""

from torch import nn

import llmlab as lab
from llmlab.step.model import build_model

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 64,
         "tie_word_embeddings": True}  # fmt: skip


def test_a_quantized_model_is_quantized_everywhere_but_in_its_head():
    import bitsandbytes as bnb

    spec = lab.model({**LLAMA, "tie_word_embeddings": False})
    model = build_model(spec, lab.Inference(weights="nf4"), "cpu")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert type(linears.pop("lm_head")) is nn.Linear
    assert all(isinstance(module, bnb.nn.Linear4bit) for module in linears.values())
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])


def test_a_quantized_models_tied_head_stays_tied():
    model = build_model(lab.model(LLAMA), lab.Inference(weights="int8"), "cpu")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
