"""Megatron-LM's block and step, held to the paper's formula, to its schedules and to its own golden values."""

from dataclasses import replace

import pytest

import llmlab as lab
from benchmarks.memory import megatron_runs
from llmlab.formulas.memory.activations import korthikanti_block
from llmlab.formulas.memory.megatron_step import MegatronMemory, layers_in_flight
from llmlab.formulas.memory.share import share_of

RUN, OWN = megatron_runs.TE, "megatron:transformer_engine=False"
TENSOR = 2 * RUN.seq * RUN.micro_batch * RUN.hidden
PP4 = lab.Training(pp=4, accumulation=8)
INTERLEAVED = replace(PP4, virtual_stages=8)


def memory(run, stage=0):
    return megatron_runs.memory(run, "A100-80GB", stage)


def kept(run):
    return sum(memory(run).whole.values())


def at(memory, name):
    return next(moment.parts for moment in memory.moments() if moment.name == name)


# ---- the block


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_block_is_the_papers(tp, sequence_parallel):
    run = replace(RUN, tp=tp, sequence_parallel=sequence_parallel and tp > 1)
    s, b, h, a = run.seq, run.micro_batch, run.hidden, run.heads
    # The paper leaves out what norms keep of a row: its mean and 1/std in fp32.
    statistics = 2 * 8 * s * b // (tp if run.sequence_parallel else 1)
    assert kept(run) == korthikanti_block(s, b, h, a, tp, run.sequence_parallel) + statistics


def test_recomputing_core_attention_leaves_34sbh():
    run = replace(RUN, tp=2, sequence_parallel=True, recompute="selective")
    s, b, h = run.seq, run.micro_batch, run.hidden
    assert sum(memory(run).activations_by_kind.values()) == run.layers * (34 * s * b * h + 2 * 8 * s * b) // 2


# ---- schedules


def test_one_f_one_b_keeps_a_micro_batch_for_each_stage_to_come():
    assert [layers_in_flight(PP4, stage, 8) for stage in range(4)] == [32, 24, 16, 8]


def test_interleaved_stages_keep_more_and_the_last_nearly_as_much_as_the_first():
    assert [layers_in_flight(INTERLEAVED, stage, 8) for stage in range(4)] == [35, 33, 31, 29]


# ---- states


@pytest.mark.parametrize(("given", "bytes_"), [
    ({}, 18), ({"fp16": True}, 20), ({"distributed_optimizer": True}, 6 + 12 / 8),
])  # fmt: skip
def test_bytes_of_a_parameter_in_the_update(given, bytes_):
    found = memory(replace(RUN, **given))
    parts = at(found, "the update")
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states == pytest.approx(bytes_ * found.parameters, abs=16)


def test_the_vocabulary_is_padded_for_each_rank():
    assert memory(replace(RUN, tp=4)).vocab == 50688 // 4


# ---- recomputation


def test_full_recomputation_keeps_an_input_of_every_group_of_layers():
    found = memory(replace(RUN, recompute="full", number=5))
    assert found.activations_by_kind == {"block inputs": 3 * TENSOR}  # of 5, 5 and 2 layers
    assert found.recomputed() == 5 * kept(RUN) - TENSOR


def test_block_recomputation_keeps_the_other_layers_whole():
    found = memory(replace(RUN, recompute="full", method="block", number=5))
    assert sum(found.activations_by_kind.values()) == 5 * TENSOR + 7 * kept(RUN)


# ---- the loss


# ---- what is asked for


def test_the_name_alone_is_megatron_in_bf16():
    assert lab.Training(stack="megatron").precision == "mixed-bf16"
    assert lab.Training(checkpointing="selective", stack="megatron").checkpointing == "selective"
    assert lab.Training(stack="megatron:recompute=full,recompute_num_layers=2").checkpointing == "full"
    given = "megatron:recompute=selective,recompute_modules=core_attn mlp"
    assert lab.Training(stack=given).stack.recompute_modules == ("core_attn", "mlp")


def test_the_fullest_stage_is_told():
    run = lab.Training(stack=lab.Megatron(recompute="full"), pp=4, tp=2, accumulation=8, seq_len=8192)
    report = lab.estimate("meta-llama/Meta-Llama-3-8B", run, "H100-80GB")
    assert report.outcome == "fits"
    assert sum(report.parts.values()) == report.peak_allocated
    assert any(note.code == "fullest-stage" and "stage 3" in note for note in report.notes)


# ---- options of NeMo's recipes

SMALL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 4, "intermediate_size": 160, "vocab_size": 512, "max_position_embeddings": 64,
         "tie_word_embeddings": False}  # fmt: skip
TABLE = 512 * 64
HALVES = "accumulate_allreduce_grads_in_fp32=false"


def small(options, stage=0, **fields):
    run = lab.Training(**{"seq_len": 32, "micro_batch": 2, **fields}, stack=f"megatron:{HALVES},{options}")
    return MegatronMemory(share_of(lab.model(SMALL), run, lab.gpu("H100-80GB"), stage=stage))


@pytest.mark.parametrize(("options", "width"), [
    ("tp_comm_overlap=false", 4 + 8),
    ("use_precision_aware_optimizer=true", 2 + 8),  # what bf16 weights have not of fp32 ones
    ("use_precision_aware_optimizer=true,fp8_recipe=delayed", 2 + 8),
    ("use_precision_aware_optimizer=true,fp8_recipe=tensorwise", 4 + 8),
    ("use_precision_aware_optimizer=true,fp8_recipe=tensorwise,fp8_param_gather=true", 4 + 8),
    ("distributed_fused_adam=fp32", 2 + 8),
    ("distributed_fused_adam=bf16", 0 + 4),
    ("distributed_fused_adam=fp32,fp8_recipe=delayed", 2 + 8),
    ("distributed_fused_adam=fp32,fp8_recipe=delayed,fp8_param_gather=true", 4 + 8),
    ("distributed_fused_adam=bf16,fp8_recipe=delayed,fp8_param_gather=true", 2 + 4),
])  # fmt: skip
def test_bytes_of_optimizer_states(options, width):
    found = small(options, dp=2, zero=1)
    assert found.resident["optimizer"] == width * (found.parameters // 2)
    # Megatron's optimizer casts halves for the update, if it has whole main weights; Apex's takes them, and sums the
    # embedding's in fp32.
    apex = "fused_adam" in options
    main = 2 if "aware" in options and width == 2 + 8 else 4
    assert found.resident["gradients"] == 2 * found.parameters + (2 * TABLE if apex else 0)
    cast = 0 if apex or main == 2 else 4 * (found.parameters // 2)
    assert at(found, "the update")["gradients"] == found.resident["gradients"] + cast
    assert at(found, "model and optimizer made")["optimizer"] == (width if apex else main) * (found.parameters // 2)


@pytest.mark.parametrize(("limit", "micro_batches"), [(0, 7), (2, 2), (22, 7)])
def test_deferred_gradients_of_the_head_keep_its_inputs_and_the_logits_gradients(limit, micro_batches):
    """Of those before the last of 8 micro-batches, on the last stage: 64 tokens' inputs and logits, in half."""
    fields = {"pp": 2, "accumulation": 8}
    deferred = f"defer_embedding_wgrad_compute=true,wgrad_deferral_limit={limit}"
    for name in ("the loss", "the first block of backward"):
        more = [at(small(deferred, stage, **fields), name)["activations"]
                - at(small("tp_comm_overlap=false", stage, **fields), name)["activations"] for stage in (0, 1)]
        assert more == [0, micro_batches * 2 * 64 * (64 + 512)]


@pytest.mark.parametrize(("given", "message"), [
    ({"recompute": "selective", "recompute_method": "block"}, "recompute_method='block' needs recompute='full'"),
    ({"recompute": "some"}, "recompute='some' is not one of None, selective, full"),
    ({"cross_entropy_fusion_impl": "apex"}, "cross_entropy_fusion_impl='apex' is not one of None, native, te"),
    ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local' is not one of None, full_iteration"),
    ({"moe_expert_capacity_factor": 0}, "moe_expert_capacity_factor=0 is neither a number above 0"),
    ({"recompute_modules": "moe"}, "recompute_modules=('moe',) is not one or both of core_attn, mlp"),
    ({"ac": "full"}, "megatron has no option ac: it is an option of torchtitan"),
    ({"distributed_fused_adam": "fp16"}, "distributed_fused_adam='fp16' is not one of None, fp32, bf16"),
    ({"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": -1}, "wgrad_deferral_limit=-1 is not a number"),
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
    ({"stack": "megatron:fp8_recipe=delayed"}, "whose MLPs are experts, with fp8_recipe='delayed'"),
    ({"stack": "megatron:recompute=selective,recompute_modules=mlp"}, "with recompute_modules='mlp'"),
    ({"stack": "megatron:bias_swiglu_fusion=false"}, "whose MLPs are experts, with bias_swiglu_fusion=False"),
])  # fmt: skip
def test_what_is_not_described_of_experts_is_refused(given, message):
    with pytest.raises(lab.SpecError) as error:
        lab.estimate("mistralai/Mixtral-8x7B-v0.1", lab.Training(**{"stack": "megatron", **given}), "H100-80GB")
    assert message in str(error.value)


def test_a_capacity_without_experts_is_refused():
    run = lab.Training(stack="megatron:moe_expert_capacity_factor=1")
    with pytest.raises(lab.SpecError, match="which has no experts"):
        lab.estimate("meta-llama/Meta-Llama-3-8B", run, "H100-80GB")


def test_an_mlp_with_biases_is_not_computed_again():
    run = lab.Training(stack=lab.Megatron(recompute="selective", recompute_modules="core_attn mlp"))
    with pytest.raises(lab.SpecError, match="checkpoint recurses without end in backward"):
        lab.estimate("gpt2", run, "H100-80GB")


def test_own_layers_are_unfused_where_nobody_says_otherwise():
    assert lab.Training(stack=OWN).attention == "eager"


def test_apexs_softmax_takes_certain_shapes():
    run = replace(megatron_runs.LOCAL, micro_batch=1, tp=2)  # 4 heads of a rank, and 3 with 6 heads
    fused, other = memory(run), memory(replace(run, heads=6, hidden=384))
    scores = lambda found, heads: found.whole["scores"] / (run.seq**2 * heads)  # noqa: E731
    assert (scores(fused, 4), scores(other, 3)) == (2 + 2 + 1, 4 + 2 + 1)  # softmax, what multiplies values, the mask


def test_the_last_stage_has_a_mask_at_the_loss():
    """get_batch gives a causal mask, a byte for each pair of positions, to the first stage and to the last, whose loss
    runs while the arguments of its forward are alive. A stage exchanges 64 tokens of 64 in half and their gradient."""
    first, last = (small("transformer_engine=false", stage, pp=2, accumulation=2) for stage in (0, 1))
    assert at(first, "the loss")["other"] == 0
    assert at(last, "the loss")["other"] == 2 * (64 * 64 * 2) + 2 * 32**2


# ---- golden values


@pytest.mark.parametrize("name", megatron_runs.RUNS)
def test_estimates_are_the_golden_values(name):
    held, peak = megatron_runs.estimated(name)
    real_held, real_peak = megatron_runs.published(name)
    assert peak == pytest.approx(real_peak, rel=0.03)
    assert held == pytest.approx(real_held, rel=0.02)


@pytest.mark.parametrize("name", megatron_runs.RECIPES)
def test_nemos_recipes_hold_their_states_and_reserve_little_more_than_the_peak(name):
    held, reserved, stays, peak = megatron_runs.recipe(name)
    assert stays == pytest.approx(held, rel=0.01)
    assert 1 < reserved / peak < 1.1  # 1.14 of the second, were the loss not fused
