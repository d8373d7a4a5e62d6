"""The moments of Megatron-LM's step."""

from dataclasses import replace

import pytest

import llmlab as lab
from benchmarks.memory import megatron_runs
from llmlab.base.errors import NotAvailable, SpecError
from llmlab.formulas.memory.megatron_step import MegatronMemory, layers_in_flight
from llmlab.formulas.memory.share import share_of
from llmlab.simulation.stacks.megatron import check

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


# ---- adapters


LLAMA = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 4, "intermediate_size": 1536, "vocab_size": 1024, "max_position_embeddings": 2048,
         "tie_word_embeddings": False}  # fmt: skip
QKV = lab.LoRA(rank=16, targets=("q_proj", "k_proj", "v_proj"))
ADAPTED = lab.Training(2, 1024, lora=QKV, stack="megatron:accumulate_allreduce_grads_in_fp32=false")
MiB = 1 << 20


def of_adapters(run):
    return MegatronMemory(share_of(lab.model(LLAMA), run, lab.gpu("H100-80GB")))


def test_adapters_alone_have_gradients_and_states():
    spec, run = lab.model(LLAMA), replace(ADAPTED, dp=4, zero=1)
    adapters = 8 * 16 * ((512 + 512) + 2 * (512 + 256))
    held = of_adapters(run).resident
    assert held["weights"] == 2 * (spec.parameters + adapters)
    assert held["gradients"] == 2 * adapters
    assert held["optimizer"] == (4 + 8) * adapters // 4  # main weights and both moments, shared by four
    assert of_adapters(replace(run, dp=2, tp=2)).resident["gradients"] == 2 * adapters // 2


def test_frozen_layers_keep_no_input():
    """Of a Llama's block here the inputs of qkv, fc1 and fc2 are 2, 2 and 6 MiB."""
    full = of_adapters(replace(ADAPTED, lora=None)).whole
    tokens, qkv = 2048, of_adapters(ADAPTED).whole
    assert full["linear inputs"] == 2 * tokens * 512 * 2 and full["mlp"] == 3 * tokens * 1536 * 2
    assert qkv["linear inputs"] == tokens * 512 * 2  # the adapters' own
    assert qkv["mlp"] == 2 * tokens * 1536 * 2  # what SwiGLU reads
    assert qkv["attention output"] == full["attention output"]  # attention's own
    down = of_adapters(replace(ADAPTED, lora=lab.LoRA(targets=("down_proj",)))).whole
    assert down["mlp"] == full["mlp"] and down["linear inputs"] == 0


def test_adapters_read_half_precision_where_the_layer_multiplies_fp8():
    stack = "megatron:fp8_recipe=tensorwise"
    full, qkv = (of_adapters(replace(ADAPTED, lora=lora, stack=stack)).whole for lora in (None, QKV))
    tokens = 2048
    assert full["linear inputs"] == 2 * tokens * 512 and qkv["linear inputs"] == tokens * 512 * 2
    assert full["attention output"] - qkv["attention output"] == tokens * 512  # o_proj's input in fp8


def test_the_head_and_the_embedding_have_no_gradient():
    moments = {moment.name: moment.total for moment in of_adapters(ADAPTED).moments()}
    of_head = moments["the head's gradient"] - moments["the gradient of the logits"]
    full = {moment.name: moment.total for moment in of_adapters(replace(ADAPTED, lora=None)).moments()}
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
        check(lab.model(LLAMA), ADAPTED)
