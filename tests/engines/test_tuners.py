"""Runs as settings of Megatron-LM, Axolotl and LLaMA-Factory."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.engines.tuners import axolotl_config, llama_factory_config, megatron_arguments


def test_megatrons_arguments_interleave_stages_with_any_stack():
    spec = lab.model("meta-llama/Llama-3.1-8B")
    run = lab.Training(pp=4, accumulation=8, precision="mixed-bf16", virtual_stages=4)
    for interleaved in (run, lab.Training(pp=4, accumulation=8, stack="megatron:virtual_pipeline=4")):
        assert "--num-virtual-stages-per-pipeline-rank 4" in megatron_arguments(interleaved, spec)
    layout = "Et*2|(t*2|)*14t*2m*1L"
    stack = lab.Megatron(virtual_pipeline=4, pipeline_model_parallel_layout=layout)
    lines = megatron_arguments(lab.Training(pp=4, accumulation=8, stack=stack), spec)
    assert f"--pipeline-model-parallel-layout '{layout}'" in lines and "--mtp-num-layers 1" in lines
    assert not any("virtual" in line for line in lines)
    with pytest.raises(SpecError, match="schedule='gpipe'"):
        megatron_arguments(replace(run, virtual_stages=1, schedule="gpipe"), spec)


def test_megatrons_arguments_say_fp8_weights_and_deferred_gradients():
    spec = lab.model("meta-llama/Llama-3.1-8B")
    options = "fp8_recipe=mxfp8,fp8_param_gather=true,defer_embedding_wgrad_compute=true,wgrad_deferral_limit=22"
    run = lab.Training(pp=2, accumulation=4, stack=f"megatron:{options}")
    arguments = " ".join(megatron_arguments(run, spec))
    assert "--fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag" in arguments
    assert "--use-distributed-optimizer" in arguments  # which alone gathers them, of one rank too
    assert "--defer-embedding-wgrad-compute --wgrad-deferral-limit 22" in arguments
    experts = lab.Training(dp=4, tp=2, sequence_parallel=True, ep=8, stack=(
        "megatron:expert_tensor_parallel_size=1,moe_flex_dispatcher_backend=hybridep,overlap_moe_expert_parallel_comm="
        "true,cuda_graph_impl=transformer_engine,cuda_graph_modules=moe_router"))  # fmt: skip
    assert {
        "--qk-layernorm", "--moe-ffn-hidden-size 768", "--expert-model-parallel-size 8",
        "--expert-tensor-parallel-size 1", "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
        "--overlap-moe-expert-parallel-comm",
        "--cuda-graph-impl transformer_engine --cuda-graph-modules moe_router",
    } <= set(megatron_arguments(experts, lab.model("Qwen/Qwen3-30B-A3B")))  # fmt: skip
    graph = replace(run, stack="megatron:cuda_graph_impl=full_iteration")
    arguments = " ".join(megatron_arguments(graph, spec))
    assert "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad" in arguments  # it asks for both
    run = lab.Training(stack="megatron:gradient_accumulation_fusion=false,overlap_p2p_communication=false")
    assert {"--no-gradient-accumulation-fusion", "--no-overlap-p2p-communication"} <= set(megatron_arguments(run, spec))
    run = lab.Training(stack="megatron:bias_swiglu_fusion=false,apply_rope_fusion=false,overlap_param_gather=false",
                       dp=2, zero=1)  # fmt: skip
    arguments = megatron_arguments(run, spec)
    assert {"--no-bias-swiglu-fusion", "--no-rope-fusion", "--overlap-grad-reduce"} <= set(arguments)
    with pytest.raises(SpecError, match="of today has no such argument"):
        megatron_arguments(lab.Training(stack="megatron:async_tensor_model_parallel_allreduce=false"), spec)
    with pytest.raises(SpecError, match="gradient_accumulation_fusion=False: Megatron-LM refuses it"):
        lab.Megatron(gradient_accumulation_fusion=False, defer_embedding_wgrad_compute=True)
    arguments = megatron_arguments(lab.Training(stack="megatron:use_precision_aware_optimizer=true"), spec)
    assert {"--use-precision-aware-optimizer", "--use-distributed-optimizer"} <= set(arguments)
    with pytest.raises(lab.SpecError, match="distributed_fused_adam='fp32' is NeMo 1's"):
        megatron_arguments(lab.Training(stack="megatron:distributed_fused_adam=fp32"), spec)


RUN = lab.Training(2, 512, "bf16", accumulation=4, lora=lab.LoRA(8, ("q_proj", "v_proj"), dropout=0.1))


def test_axolotls_settings_are_the_runs():
    config = axolotl_config(RUN, "m")
    assert {"base_model": "m", "sequence_len": 512, "micro_batch_size": 2, "gradient_accumulation_steps": 4,
            "bf16": True, "fp16": False, "float16": False, "gradient_checkpointing": False, "max_grad_norm": 0.0,
            "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "load_in_4bit": False,
            "lora_target_modules": ["q_proj", "v_proj"], "attn_implementation": "sdpa"}.items() <= config.items()
    assert "deepspeed" not in config and "gradient_checkpointing_kwargs" not in config
    more = replace(RUN, checkpointing="full", quantization="nf4", attention="flash", kernels="liger",
                   lora=lab.LoRA(8, alpha=4))  # fmt: skip
    assert {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "lora_alpha": 4,
            "adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False},
            "attn_implementation": "flash_attention_2", "liger_rope": True}.items() <= axolotl_config(more, "m").items()
    whole = axolotl_config(lab.Training(precision="mixed-bf16", zero=2, dp=2), "m")
    assert whole["deepspeed"] == "ds_config.json" and "adapter" not in whole
    with pytest.raises(SpecError, match="loads the weights in the dtype that it casts to"):
        axolotl_config(lab.Training(precision="autocast-bf16"), "m")


def test_llama_factorys_settings_are_the_runs():
    config = llama_factory_config(RUN, "m")
    assert {"finetuning_type": "lora", "cutoff_len": 512, "per_device_train_batch_size": 2, "pure_bf16": True,
            "lora_rank": 8, "lora_alpha": 16, "lora_target": "q_proj,v_proj", "flash_attn": "sdpa",
            "disable_gradient_checkpointing": True}.items() <= config.items()
    more = replace(RUN, precision="fp16", checkpointing="full", quantization="int8", lora=lab.LoRA(8, alpha=4))
    assert {"fp16": True, "quantization_bit": 8, "double_quantization": False, "lora_alpha": 4,
            "use_reentrant_gc": False,
            "disable_gradient_checkpointing": False}.items() <= llama_factory_config(more, "m").items()
    whole = llama_factory_config(lab.Training(precision="mixed-bf16", zero=2, dp=2, attention="flash"), "m")
    assert (whole["finetuning_type"], whole["flash_attn"], whole["deepspeed"]) == ("full", "fa2", "ds_config.json")
    for run in (lab.Training(precision="fp16"), replace(RUN, precision="autocast-bf16")):
        with pytest.raises(SpecError, match="LLaMA-Factory"):
            llama_factory_config(run, "m")


def test_megatrons_arguments_have_the_models_sizes():
    spec = lab.model("mistralai/Mistral-7B-v0.1")
    run = lab.Training(2, 4096, "mixed-bf16", accumulation=4, dp=4, tp=2, zero=1, sequence_parallel=True,
                       checkpointing="full")  # fmt: skip
    assert {"--num-layers 32", "--hidden-size 4096", "--ffn-hidden-size 14336", "--seq-length 4096", "--bf16",
            "--max-position-embeddings 32768", "--micro-batch-size 2", "--global-batch-size 32",
            "--tensor-model-parallel-size 2", "--use-distributed-optimizer", "--sequence-parallel",
            "--group-query-attention --num-query-groups 8", "--rotary-base 10000", "--attention-backend auto",
            "--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1",
            "--untie-embeddings-and-output-weights"} <= set(megatron_arguments(run, spec))
    with pytest.raises(SpecError, match="a window shorter than the sequence"):
        megatron_arguments(replace(run, seq_len=8192), spec)
    plain = megatron_arguments(lab.Training(precision="mixed-fp16", attention="eager"), lab.model("gpt2"))
    assert {"--fp16", "--attention-backend unfused", "--position-embedding-type learned_absolute"} <= set(plain)
    assert not {"--swiglu", "--sequence-parallel", "--untie-embeddings-and-output-weights"} & set(plain)
