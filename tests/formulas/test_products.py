"""The matrix products of a step: which of them recomputation makes again."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab import LoRA, Training
from llmlab.formulas.time.flops import flops
from llmlab.formulas.time.products import is_last, products


@pytest.mark.parametrize(("model", "spared"), [
    ("Llama-3.2-1B", {"down_proj"}),
    ("deepseek-ai/DeepSeek-V3", {"down_proj"}),  # of dense layers and of shared experts
    ("gpt2", set()),  # dropout behind it has its mask to make again
    ("gemma-2-2b", set()),  # and so has a norm its input
])  # fmt: skip
def test_recomputation_stops_before_the_product_whose_output_backward_does_not_need(model, spared):
    spec = lab.model(model)
    assert {linear.name for linear in spec.block_linears if is_last(spec, linear)} == spared


def test_one_enumeration_of_products_for_flop_and_for_time():
    spec, run = lab.model("Qwen3-30B-A3B"), Training(micro_batch=2, seq_len=512, checkpointing="full", dp=2)
    counted = flops(spec, run)
    sums = [sum(part) for part in zip(*(each.flops(2048) for each in products(spec, run)), strict=True)]
    scores = counted.by_part["scores"]
    assert sum(sums) == counted.total - scores
    frozen = products(spec, replace(run, lora=LoRA(rank=8)))
    assert not any(each.weight_gradient for each in frozen if each.part != "adapters")
    assert sum(each.part == "adapters" for each in frozen) == 4  # down and up, of q_proj and v_proj


def test_torchtitan_computes_every_second_product_again():
    """wq, wk, wv, wo, w1, w3, w2: the second of each pair is not kept (torchtitan's activation_checkpoint.py)."""
    spec = lab.model("meta-llama/Llama-3.1-8B")
    run = Training(seq_len=8192, dp=8, checkpointing="selective", stack=lab.Torchtitan())
    widths = 4096 * 1024 + 4096 * 4096 + 4096 * 14336  # k_proj, o_proj, up_proj

    def again(stack):
        return sum(each.again * each.inputs * each.outputs for each in products(spec, replace(run, stack=stack)))

    assert again(lab.Torchtitan()) == 32 * widths
    blocks = sum(linear.inputs * linear.outputs * linear.count for linear in spec.linears if linear.part != "head")
    last = 4096 * 14336 * 32  # what a block computes last is not needed again
    assert again(lab.Torchtitan(ac="selective_layers", every=2)) == blocks // 2 != (blocks - last) // 2
    run = Training(seq_len=8192, precision="mixed-bf16", checkpointing="selective", stack=lab.Megatron())
    assert again(lab.Megatron()) == 0
