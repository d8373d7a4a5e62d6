"""Megatron-Bridge's adapters beside Transformer Engine's layers: what they hold, what frozen layers keep, and time."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.base.errors import NotAvailable, SpecError
from llmlab.formulas.memory.megatron_step import MegatronMemory
from llmlab.formulas.memory.share import share_of
from llmlab.simulation.stacks.megatron import check

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 4, "intermediate_size": 1536, "vocab_size": 1024, "max_position_embeddings": 2048,
         "tie_word_embeddings": False}  # fmt: skip
QKV = lab.LoRA(rank=16, targets=("q_proj", "k_proj", "v_proj"))
RUN = lab.Training(2, 1024, lora=QKV, stack="megatron:accumulate_allreduce_grads_in_fp32=false")
MiB = 1 << 20


def memory(run):
    return MegatronMemory(share_of(lab.model(LLAMA), run, lab.gpu("H100-80GB")))


def test_adapters_alone_have_gradients_and_states():
    spec, run = lab.model(LLAMA), replace(RUN, dp=4, zero=1)
    adapters = 8 * 16 * ((512 + 512) + 2 * (512 + 256))
    held = memory(run).resident
    assert held["weights"] == 2 * (spec.parameters + adapters)
    assert held["gradients"] == 2 * adapters
    assert held["optimizer"] == (4 + 8) * adapters // 4  # main weights and both moments, shared by four
    assert memory(replace(run, dp=2, tp=2)).resident["gradients"] == 2 * adapters // 2


def test_frozen_layers_keep_no_input():
    """Of a Llama's block here the inputs of qkv, fc1 and fc2 are 2, 2 and 6 MiB."""
    full = memory(replace(RUN, lora=None)).whole
    tokens, qkv = 2048, memory(RUN).whole
    assert full["linear inputs"] == 2 * tokens * 512 * 2 and full["mlp"] == 3 * tokens * 1536 * 2
    assert qkv["linear inputs"] == tokens * 512 * 2  # the adapters' own
    assert qkv["mlp"] == 2 * tokens * 1536 * 2  # what SwiGLU reads
    assert qkv["attention output"] == full["attention output"]  # attention's own
    down = memory(replace(RUN, lora=lab.LoRA(targets=("down_proj",)))).whole
    assert down["mlp"] == full["mlp"] and down["linear inputs"] == 0


def test_adapters_read_half_precision_where_the_layer_multiplies_fp8():
    stack = "megatron:fp8_recipe=tensorwise"
    full, qkv = (memory(replace(RUN, lora=lora, stack=stack)).whole for lora in (None, QKV))
    tokens = 2048
    assert full["linear inputs"] == 2 * tokens * 512 and qkv["linear inputs"] == tokens * 512 * 2
    assert full["attention output"] - qkv["attention output"] == tokens * 512  # o_proj's input in fp8


def test_the_head_and_the_embedding_have_no_gradient():
    moments = {moment.name: moment.total for moment in memory(RUN).moments()}
    of_head = moments["the head's gradient"] - moments["the gradient of the logits"]
    full = {moment.name: moment.total for moment in memory(replace(RUN, lora=None)).moments()}
    assert full["the head's gradient"] - full["the gradient of the logits"] - of_head == 2 * 1024 * 512


def test_frozen_weights_have_no_product_for_their_gradient():
    spec, gpu = "meta-llama/Meta-Llama-3-8B", "H100-80GB"
    run = lab.Training(1, 4096, dp=8, zero=1, lora=QKV, stack="megatron:fp8_recipe=tensorwise")
    full, adapters = (lab.estimate(spec, replace(run, lora=lora), gpu).time for lora in (None, QKV))
    assert 0.6 < adapters["products"] / full["products"] < 0.75  # two products of three
    assert adapters["data"] < 0.1 * full["data"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lora": lab.LoRA(dropout=0.1), "stack": "megatron"}, "dropout=0.1 of lora= is not supported for megatron"),
        ({"lora": QKV, "stack": "megatron:transformer_engine=false"}, "with Transformer Engine's layers"),
        ({"lora": QKV, "pp": 2, "stack": "megatron:defer_embedding_wgrad_compute=true"}, "give one of the two"),
        ({"lora": QKV, "dp": 2, "zero": 1, "stack": "megatron:distributed_fused_adam=bf16"}, "Megatron-LM's own"),
    ],
)
def test_what_is_not_described_is_refused(fields, said):
    with pytest.raises(SpecError, match=said):
        lab.Training(1, 1024, **fields)


def test_they_are_not_simulated():
    """As no layer of Transformer Engine is, asked before megatron-core is imported, which may not be installed."""
    with pytest.raises(NotAvailable, match="simulate has no layers of Transformer Engine"):
        check(lab.model(LLAMA), RUN)
