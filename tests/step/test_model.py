"""The model of a step: its random weights, and what is refused before it is built."""

import math
import sys

import pytest
import torch
from torch import nn

import llmlab as lab
from llmlab.step.model import build_model, confined_kernels
from llmlab.step.optimizer import build_optimizer

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 64,
         "tie_word_embeddings": True}  # fmt: skip
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "mistral": {}, "mixtral": MOE, "qwen2": {}, "qwen3": {"head_dim": 16}, "qwen3_moe": {**MOE, "head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16}, "phi3": {"pad_token_id": 0},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_model_of_every_family_knows_nothing(family):
    """Its loss is that of guessing, ln V: nothing is left uninitialised, rotary frequencies neither."""
    config = {**LLAMA, "model_type": family, "bos_token_id": 0, "eos_token_id": 0, **FAMILIES[family]}
    torch.manual_seed(0)
    attention = "eager" if family == "gemma2" else "sdpa"
    model = build_model(lab.model(config), lab.Training(seq_len=32, attention=attention), "cpu")
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    ids = torch.randint(500, (2, 32))
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert abs(loss - math.log(500)) < 0.3
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            assert buffer[0] == 1 and (buffer.diff() < 0).all()


def test_an_attention_the_model_class_lacks_is_refused_with_the_one_it_has():
    config = {**LLAMA, "model_type": "gemma2", **FAMILIES["gemma2"]}
    with pytest.raises(lab.NotAvailable, match="gemma2 has no attention='sdpa'; use attention='eager'"):
        build_model(lab.model(config), lab.Training(seq_len=32), "cpu")


def test_lora_on_a_layer_that_is_not_there_names_those_that_are():
    run = lab.Training(seq_len=32, lora=lab.LoRA(targets=("q_proj",)))
    with pytest.raises(lab.SpecError, match=r"q_proj .*c_attn"):
        build_model(lab.model("gpt2"), run, "cpu")


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch):
    for module in ("llmlab.step.model", "llmlab.step.optimizer"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    with pytest.raises(lab.NotAvailable, match=r"bitsandbytes.*llmlab\[quant\]"):
        build_optimizer("lion", [nn.Parameter(torch.ones(1))])
    with pytest.raises(lab.NotAvailable, match=r"peft.*llmlab\[quant\]"):
        build_model(lab.model(LLAMA), lab.Training(seq_len=32, lora=lab.LoRA()), "cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="Liger needs Triton, which has wheels for Linux alone")
def test_liger_leaves_later_models_alone():
    """For one model it replaces classes of the family's module, of which the next would be made."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformers.models.llama import modeling_llama

    spec, run = lab.model(LLAMA), lab.Training(kernels="liger")
    before = dict(vars(modeling_llama))
    with confined_kernels(spec, run):
        _apply_liger_kernel_to_instance(model=build_model(spec, lab.Training(), "cpu"))
        assert modeling_llama.LlamaRMSNorm is not before["LlamaRMSNorm"]
    assert vars(modeling_llama) == before
