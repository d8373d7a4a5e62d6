"""Options of Megatron-LM."""

import pytest

import llmlab as lab

OWN = "megatron:transformer_engine=False"


def test_the_name_alone_is_megatron_in_bf16():
    assert lab.Training(stack="megatron").precision == "mixed-bf16"
    assert lab.Training(checkpointing="selective", stack="megatron").checkpointing == "selective"
    assert lab.Training(stack="megatron:recompute=full,recompute_num_layers=2").checkpointing == "full"
    given = "megatron:recompute=selective,recompute_modules=core_attn mlp"
    assert lab.Training(stack=given).stack.recompute_modules == ("core_attn", "mlp")


@pytest.mark.parametrize(("given", "message"), [
    ({"recompute": "selective", "recompute_method": "block"}, "recompute_method='block' needs recompute='full'"),
    ({"recompute": "some"}, "recompute='some' is not one of None, selective, full"),
    ({"cross_entropy_fusion_impl": "apex"}, "cross_entropy_fusion_impl='apex' is not one of None, native, te"),
    ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local' is not one of None, full_iteration, transformer_engine"),
    ({"moe_expert_capacity_factor": 0}, "moe_expert_capacity_factor=0 is neither a number above 0"),
    ({"recompute_modules": "moe"}, "recompute_modules=('moe',) is not among core_attn, layernorm, mla_up_proj, mlp"),
    ({"pipeline_model_parallel_layout": "Et*4|xL"}, "has other letters than E, t, m and L"),
    ({"ac": "full"}, "megatron has no option ac: it is an option of torchtitan"),
    ({"distributed_fused_adam": "fp16"}, "distributed_fused_adam='fp16' is not one of None, fp32, bf16"),
    ({"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": -1}, "wgrad_deferral_limit=-1 is not a number"),
    ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2 is not supported"),
    ({"cuda_graph_modules": "moe"}, "cuda_graph_modules=('moe',) is not among attn, moe_preprocess, moe_router"),
    ({"use_transformer_engine_op_fuser": True, "fp8_recipe": "blockwise"}, "needs fp8_recipe='mxfp8'"),
    ({"wgrad_deferral_limit": 22}, "wgrad_deferral_limit=22 needs defer_embedding_wgrad_compute=True"),
])  # fmt: skip
def test_bad_options_are_named(given, message):
    with pytest.raises(lab.SpecError) as error:
        lab.Megatron(**given)
    assert message in str(error.value)


@pytest.mark.parametrize(("given", "message"), [
    ({"zero": 3, "dp": 2}, "megatron has no zero=3"),
    ({"precision": "autocast-bf16"}, "megatron has no precision='autocast-bf16'"),
    ({"checkpointing": "selective", "stack": "megatron:recompute=full"}, "give one of them"),
    ({"stack": "megatron:virtual_pipeline=2"}, "virtual_stages=2 with pp=1"),
    ({"stack": "megatron:virtual_pipeline=3", "pp": 4, "accumulation": 4}, "does not divide the layers"),
    ({"stack": "megatron:virtual_pipeline=2", "pp": 4, "accumulation": 6}, "a multiple of pp=4"),
    ({"stack": "megatron:recompute=full,recompute_num_layers=5"}, "recompute_num_layers=5 does not divide the 32"),
    ({"stack": OWN, "cp": 2}, "cp=2: attention of Megatron's own layers (transformer_engine=False) needs whole"),
    ({"stack": OWN, "attention": "flash"}, "attention='flash': Megatron's own layers"),
    ({"stack": OWN, "tp": 2, "sequence_parallel": True}, "RMSNorm of Megatron's own layers is PyTorch's"),
    ({"stack": f"{OWN},apex=False", "tp": 2, "sequence_parallel": True}, "then use PyTorch's norm"),
    ({"stack": "megatron:recompute=selective,recompute_modules=moe_act"}, "recompute_modules='moe_act' with meta"),
    ({"stack": "megatron:pipeline_model_parallel_layout=Et*9|(t*8|)*2t*8L", "pp": 4, "accumulation": 4},
     "has 4 chunks with 33 layers"),
    ({"stack": "megatron:apex=False"}, "apex=False with transformer_engine=True"),
    ({"stack": "megatron:tp_comm_overlap=true", "tp": 2}, "tp_comm_overlap=True needs sequence_parallel=True"),
    ({"stack": "megatron:defer_embedding_wgrad_compute=true"}, "defer_embedding_wgrad_compute=True with pp=1"),
    ({"stack": "megatron:distributed_fused_adam=bf16", "dp": 2}, "distributed_fused_adam='bf16' with zero=0"),
    ({"stack": "megatron:distributed_fused_adam=fp32", "precision": "mixed-fp16"}, "with precision='mixed-fp16'"),
    ({"stack": "megatron:use_precision_aware_optimizer=true", "dp": 2}, "aware_optimizer=True with zero=0"),
    ({"stack": "megatron:use_precision_aware_optimizer=true,distributed_fused_adam=fp32"}, "each is an optimizer"),
    ({"stack": "megatron:use_precision_aware_optimizer=true,fp8_recipe=delayed,fp8_param_gather=true"},
     "fp8_recipe='delayed' is not supported"),
])  # fmt: skip
def test_what_megatron_has_not_is_refused(given, message):
    with pytest.raises(lab.SpecError) as error:
        lab.estimate("meta-llama/Meta-Llama-3-8B", lab.Training(**{"stack": "megatron", **given}), "H100-80GB")
    assert message in str(error.value)


@pytest.mark.parametrize(("given", "message"), [
    ({"tp": 2}, "whose MLPs are experts, with tp=2"),
    ({"tp": 2, "stack": "megatron:expert_tensor_parallel_size=1"}, "with tp=2 and sequence_parallel=False"),
    ({"stack": "megatron:recompute=selective,recompute_modules=mlp"}, "with recompute_modules='mlp'"),
    ({"stack": "megatron:bias_swiglu_fusion=false"}, "whose MLPs are experts, with bias_swiglu_fusion=False"),
])  # fmt: skip
def test_what_is_not_described_of_experts_is_refused(given, message):
    with pytest.raises(lab.SpecError) as error:
        lab.estimate("mistralai/Mixtral-8x7B-v0.1", lab.Training(**{"stack": "megatron", **given}), "H100-80GB")
    assert message in str(error.value)


def test_experts_are_shared_by_all_ranks_of_a_stage_that_have_whole_ones():
    """As 256 H100s train Qwen3-235B: tp 2, pp 8, and 32 ranks for the experts of a stage."""
    many = {"tp": 2, "sequence_parallel": True, "pp": 8, "dp": 16, "accumulation": 8}
    run = lab.Training(**many, ep=32, stack="megatron:expert_tensor_parallel_size=1")
    assert (run.expert_tp, run.world_size) == (1, 256)
    for given in ({"ep": 64, "stack": run.stack}, {"ep": 32, "stack": "megatron"}, {"ep": 32}):
        with pytest.raises(lab.SpecError, match="whose ranks share the experts"):
            lab.Training(**many, **given)


@pytest.mark.parametrize("option", ["cuda_graph_impl=transformer_engine", "overlap_moe_expert_parallel_comm=True",
                                    "fp8_recipe=mxfp8,use_transformer_engine_op_fuser=True"])  # fmt: skip
def test_options_of_experts_without_experts_are_refused(option):
    run = lab.Training(stack=f"megatron:{option}")
    with pytest.raises(lab.SpecError, match="is described for experts only"):
        lab.estimate("meta-llama/Meta-Llama-3-8B", run, "B200")


def test_a_capacity_without_experts_is_refused():
    run = lab.Training(stack="megatron:moe_expert_capacity_factor=1")
    with pytest.raises(lab.SpecError, match="which has no experts"):
        lab.estimate("meta-llama/Meta-Llama-3-8B", run, "H100-80GB")
