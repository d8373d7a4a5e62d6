"""The moments of Megatron-LM's step."""

from dataclasses import replace

import pytest

import llmlab as lab
from benchmarks.memory import megatron_runs
from llmlab.formulas.memory.megatron_step import MegatronMemory, layers_in_flight
from llmlab.formulas.memory.share import share_of

RUN = megatron_runs.TE
TENSOR = 2 * RUN.seq * RUN.micro_batch * RUN.hidden
PP4 = lab.Training(pp=4, accumulation=8)
INTERLEAVED = replace(PP4, virtual_stages=8)


def memory(run, stage=0):
    return megatron_runs.memory(run, "A100-80GB", stage)


def kept(run):
    return sum(memory(run).whole.values())


def at(memory, name):
    return next(moment.parts for moment in memory.moments() if moment.name == name)


def test_one_f_one_b_keeps_a_micro_batch_for_each_stage_to_come():
    assert [layers_in_flight(PP4, stage, 8) for stage in range(4)] == [32, 24, 16, 8]


def test_interleaved_stages_keep_more_and_the_last_nearly_as_much_as_the_first():
    assert [layers_in_flight(INTERLEAVED, stage, 8) for stage in range(4)] == [35, 33, 31, 29]


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


def test_full_recomputation_keeps_an_input_of_every_group_of_layers():
    found = memory(replace(RUN, recompute="full", number=5))
    assert found.activations_by_kind == {"block inputs": 3 * TENSOR}  # of 5, 5 and 2 layers
    assert found.recomputed() == 5 * kept(RUN) - TENSOR


def test_block_recomputation_keeps_the_other_layers_whole():
    found = memory(replace(RUN, recompute="full", method="block", number=5))
    assert sum(found.activations_by_kind.values()) == 5 * TENSOR + 7 * kept(RUN)


def test_the_fullest_stage_is_told():
    run = lab.Training(stack=lab.Megatron(recompute="full"), pp=4, tp=2, accumulation=8, seq_len=8192)
    report = lab.estimate("meta-llama/Meta-Llama-3-8B", run, "H100-80GB")
    assert report.outcome == "fits"
    assert sum(report.parts.values()) == report.peak_allocated
    assert any(note.code == "fullest-stage" and "stage 3" in note for note in report.notes)


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


def test_the_last_stage_has_a_mask_at_the_loss():
    """get_batch gives a causal mask, a byte for each pair of positions, to the first stage and to the last, whose loss
    runs while the arguments of its forward are alive. A stage exchanges 64 tokens of 64 in half and their gradient."""
    first, last = (small("transformer_engine=false", stage, pp=2, accumulation=2) for stage in (0, 1))
    assert at(first, "the loss")["other"] == 0
    assert at(last, "the loss")["other"] == 2 * (64 * 64 * 2) + 2 * 32**2


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
