"""Runs as settings of Megatron-LM, Axolotl and LLaMA-Factory."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.engines.tuners import megatron_arguments


def test_megatrons_arguments_interleave_stages_with_any_stack():
    spec = lab.model("meta-llama/Llama-3.1-8B")
    run = lab.Training(pp=4, accumulation=8, precision="mixed-bf16", virtual_stages=4)
    for interleaved in (run, lab.Training(pp=4, accumulation=8, stack="megatron:virtual_pipeline=4")):
        assert "--num-virtual-stages-per-pipeline-rank 4" in megatron_arguments(interleaved, spec)
    with pytest.raises(SpecError, match="schedule='gpipe'"):
        megatron_arguments(replace(run, virtual_stages=1, schedule="gpipe"), spec)


def test_megatrons_arguments_say_fp8_weights_and_deferred_gradients():
    spec = lab.model("meta-llama/Llama-3.1-8B")
    options = "fp8_recipe=mxfp8,fp8_param_gather=true,defer_embedding_wgrad_compute=true,wgrad_deferral_limit=22"
    run = lab.Training(pp=2, accumulation=4, stack=f"megatron:{options}")
    said = " ".join(megatron_arguments(run, spec))
    assert "--fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag" in said
    assert "--use-distributed-optimizer" in said  # which alone gathers them, of one rank too
    assert "--defer-embedding-wgrad-compute --wgrad-deferral-limit 22" in said
    graph = replace(run, stack="megatron:cuda_graph_impl=full_iteration")
    said = " ".join(megatron_arguments(graph, spec))
    assert "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad" in said  # it asks for both
    run = lab.Training(stack="megatron:gradient_accumulation_fusion=false,overlap_p2p_communication=false")
    assert {"--no-gradient-accumulation-fusion", "--no-overlap-p2p-communication"} <= set(megatron_arguments(run, spec))
    run = lab.Training(stack="megatron:bias_swiglu_fusion=false,apply_rope_fusion=false,overlap_param_gather=false",
                       dp=2, zero=1)  # fmt: skip
    said = megatron_arguments(run, spec)
    assert {"--no-bias-swiglu-fusion", "--no-rope-fusion", "--overlap-grad-reduce"} <= set(said)
    with pytest.raises(SpecError, match="of today has no such argument"):
        megatron_arguments(lab.Training(stack="megatron:async_tensor_model_parallel_allreduce=false"), spec)
    with pytest.raises(SpecError, match="gradient_accumulation_fusion=False: Megatron-LM refuses it"):
        lab.Megatron(gradient_accumulation_fusion=False, defer_embedding_wgrad_compute=True)
    said = megatron_arguments(lab.Training(stack="megatron:use_precision_aware_optimizer=true"), spec)
    assert {"--use-precision-aware-optimizer", "--use-distributed-optimizer"} <= set(said)
    with pytest.raises(lab.SpecError, match="distributed_fused_adam='fp32' is NeMo 1's"):
        megatron_arguments(lab.Training(stack="megatron:distributed_fused_adam=fp32"), spec)
