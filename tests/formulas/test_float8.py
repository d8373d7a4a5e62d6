"""Training in fp8: which products are, what casts cost, what is gathered, and what is refused."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.base.errors import NotAvailable
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.step import step_memory
from llmlab.formulas.time.data_parallel import data_parallel
from llmlab.formulas.time.distributed import step
from llmlab.formulas.time.elementwise import moved
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.step import product_seconds
from llmlab.hardware.links import cluster

LLAMA = "meta-llama/Llama-3.1-8B"
BF16 = lab.Training(seq_len=8192, precision="bf16", compile=True)
SHARDED = replace(BF16, precision="mixed-bf16", zero=3, dp=8)
RECIPES = ("tensorwise", "rowwise")


def test_linear_layers_of_blocks_multiply_in_fp8_and_the_head_does_not():
    spec, found = lab.model(LLAMA), kernels("H100-80GB")
    half, eight = (product_seconds(spec, run, found) for run in (BF16, replace(BF16, fp8="rowwise")))
    assert half["head"] == eight["head"]
    assert 1.3 < half["mlp"] / eight["mlp"] < 2 and 1.1 < half["attention"] / eight["attention"] < 2
    ups = spec.layers * 2 * found.matmul(8192, 14336, 4096, "fp8")
    assert ups < eight["mlp"]


def test_tensorwise_gathers_a_byte_per_weight():
    spec = lab.model(LLAMA)
    moments = {fp8: {m.name: m.parts for m in training_moments(spec, replace(SHARDED, fp8=fp8), lab.gpu("H100"))}
               for fp8 in (None, *RECIPES)}  # fmt: skip
    block = spec.block_linear_elements // spec.layers
    sizes = {fp8: of["the last block of backward"]["weights"] for fp8, of in moments.items()}
    assert sizes[None] - sizes["tensorwise"] == block
    assert sizes["rowwise"] == sizes[None]
    nodes = cluster("H100")
    sent = {fp8: step(spec, replace(SHARDED, fp8=fp8), "H100", nodes, overlap=()).data_sent for fp8 in moments}
    assert sent["rowwise"] == sent[None]
    gather = kernels("H100").collective
    half, eight = (gather("all-gather", width * block, nodes.group(8)) for width in (2, 1))
    assert sent[None] - sent["tensorwise"] == pytest.approx(2 * spec.layers * (half - eight), rel=0.02)


@pytest.mark.parametrize(("fp8", "gain"), [("tensorwise", 1.25), ("rowwise", 1.10)])
def test_what_fp8_gains_is_about_what_torchao_published(fp8, gain):
    """pytorch/ao, docs/source/workflows/training.md: Llama 3 8B on 8 H100s, FSDP2, compiled, one sequence of 8192."""
    run = replace(SHARDED, checkpointing="selective")
    half, eight = (lab.estimate(LLAMA, each, "H100").step_seconds for each in (run, replace(run, fp8=fp8)))
    assert half / eight == pytest.approx(gain, abs=0.08)


@pytest.mark.parametrize(("model", "fields", "card", "words"), [
    (LLAMA, {"precision": "fp32"}, "H100", "bf16 or mixed-bf16"),
    (LLAMA, {"compile": False}, "H100", "compile=True"),
    (LLAMA, {"lora": lab.LoRA()}, "H100", "lora"),
    (LLAMA, {"seq_len": 1000}, "H100", "16 rows"),
    (LLAMA, {}, "A100", "A100-80GB has no fp8 units"),
    (LLAMA, {"fp8": "delayed"}, "H100", "tensorwise, rowwise"),
    ("gpt2", {"seq_len": 1024}, "H100", "Conv1D"),
    ("Qwen/Qwen2.5-0.5B", {"seq_len": 1024, "tp": 14}, "H100", "multiples of 224"),
])  # fmt: skip
def test_what_cannot_be_in_fp8_is_refused(model, fields, card, words):
    with pytest.raises(lab.SpecError, match=words):
        lab.estimate(model, lab.Training(**{**vars(BF16), "fp8": "rowwise", **fields}), card)


def test_no_verb_but_estimate_knows_the_casts():
    with pytest.raises(NotAvailable, match=r"fp8='rowwise'.*lab\.estimate"):
        lab.simulate("HuggingFaceTB/SmolLM2-135M", replace(BF16, seq_len=64, fp8="rowwise"), "H100")


@pytest.mark.parametrize("card", ["L4", "RTX-4090", "H100", "B200", "MI300X"])
@pytest.mark.parametrize("fp8", RECIPES)
def test_every_card_with_fp8_units_has_a_time(card, fp8):
    report = lab.estimate(LLAMA, replace(BF16, fp8=fp8), card)
    assert report.step_seconds_low < report.step_seconds < report.step_seconds_high


# ---- Transformer Engine, in Megatron-LM


SMALL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 160, "vocab_size": 512,
         "max_position_embeddings": 64}  # fmt: skip


WEIGHTS = 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 160)  # elements of its blocks


def engine(recipe, alone=False, **fields):
    """A run in which Transformer Engine's fp8 weights stand beside half ones, or `alone`."""
    stack = lab.Megatron(fp8_recipe=recipe, fp8_param_gather=alone)
    return lab.Training(**{"seq_len": 8192, **fields}, stack=stack)


def at_the_loss(run, card="H100"):
    moments = step_memory(share_of(lab.model(SMALL), run, lab.gpu(card))).moments()
    return next(moment.parts for moment in moments if moment.name == "the loss")


def test_blackwell_transposes_nothing_that_has_one_scale():
    """Per element of what is cast, one byte less is written in fp8; blocks' scales want both layouts anyway."""
    spec = lab.model(SMALL)
    for recipe, kept in (("delayed", False), ("tensorwise", False), ("mxfp8", True)):
        run = engine(recipe, micro_batch=2, seq_len=32)
        hopper, blackwell = (moved(spec, run, lab.gpu(card)).blocks for card in ("H100", "B200"))
        assert (hopper == blackwell) is kept
    inputs, outputs, weights = 64 + 64 + 64 + 160, 64 + 32 + 32 + 64 + 160 + 160 + 64, 64 * 192 + 3 * 64 * 160
    run = engine("tensorwise", micro_batch=2, seq_len=32)
    less = moved(spec, run, lab.gpu("H100")).blocks - moved(spec, run, lab.gpu("B200")).blocks
    assert less == 3 * (64 * (inputs + outputs) + weights)


def test_transformer_engine_keeps_inputs_in_a_byte_and_weights_twice_in_fp8():
    half, eight = (at_the_loss(engine(recipe, micro_batch=2, seq_len=32)) for recipe in (None, "delayed"))
    assert eight["weights"] - half["weights"] == 2 * WEIGHTS
    # Inputs of q, k, v and of gate and up, and that of down, in 1 byte for 2; that of o besides attention's output.
    assert half["activations"] - eight["activations"] == 3 * 64 * (64 + 64 + 160 - 64)


def test_blocks_of_activations_have_scales():
    each, blocks = (at_the_loss(engine(recipe, micro_batch=2, seq_len=32), "B200") for recipe in ("delayed", "mxfp8"))
    # Inputs of q, k, v, of o, of gate and up, and of down: a byte of scales for 32 elements.
    assert blocks["activations"] - each["activations"] == 3 * 64 * (64 + 64 + 64 + 160) // 32


@pytest.mark.parametrize(("card", "recipe", "alone", "more"), [
    ("H100", "tensorwise", False, 2),  # as it is, and transposed
    ("H100", "delayed", True, 2 - 2),
    ("H100", "tensorwise", True, 2 - 2),
    ("H100", "blockwise", True, 2 * 4 / 128**2),
    ("B200", "tensorwise", False, 1),  # Blackwell multiplies both
    ("B200", "delayed", True, 1 - 2),
    ("GB300", "tensorwise", True, 1 - 2),
    ("RTX-5090", "tensorwise", True, 2 - 2),  # of 12.0, but that one does not
    ("B200", "mxfp8", False, 2 * 33 / 32),
    ("B200", "mxfp8", True, 2 * 33 / 32 - 2),
])  # fmt: skip
def test_weights_in_fp8_beside_half_ones_or_alone(card, recipe, alone, more):
    half, eight = (at_the_loss(engine(r, alone and bool(r)), card)["weights"] for r in (None, recipe))
    assert eight - half == int((more + 2 * alone) * WEIGHTS) - 2 * alone * WEIGHTS


@pytest.mark.parametrize(("recipe", "less"), [("delayed", 1), ("tensorwise", 1), ("mxfp8", 0)])
def test_weights_in_fp8_alone_are_gathered_so_but_in_blocks_of_32(recipe, less):
    """Each rank's stage of 40 of 80 layers, on 4 tensor-parallel ranks: a byte per element less than in half."""
    spec, nodes = lab.model("meta-llama/Llama-3.1-70B"), cluster("B200")
    sent = []
    for alone in (False, True):
        run = engine(recipe, alone, dp=4, tp=4, pp=2, zero=1, sequence_parallel=True, accumulation=2)
        group = data_parallel(spec, run, nodes, kernels("B200"), 1.0, 1 / 3, ("data",), 2**25)
        sent.append(group.bytes)
    elements = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672
    assert sent[0] - sent[1] == less * 40 * elements // 4


def test_transformer_engine_gathers_in_fp8_and_scatters_in_half():
    spec, nodes = lab.model(LLAMA), cluster("H100")
    runs = (engine(recipe, tp=4, sequence_parallel=True) for recipe in (None, "delayed"))
    half, eight = (step(spec, run, "H100", nodes, overlap=("data",)).tensor for run in runs)  # nothing hidden
    gather = kernels("H100").collective
    size = 8192 * spec.hidden * 2
    saved = gather("all-gather", size, nodes.group(4)) - gather("all-gather", size / 2, nodes.group(4))
    assert half - eight == pytest.approx(4 * spec.layers * saved)


def test_what_transformer_engine_s_fp8_gains_is_about_what_nvidia_published():
    """NVIDIA/dgxc-benchmarking, llama3.1/README.md of 2024-12: 8B on 8 H100s, 112,388 tokens/s for 85,459 in bf16."""
    runs = (engine(recipe, dp=4, cp=2, zero=1, accumulation=32) for recipe in (None, "delayed"))
    half, eight = (lab.estimate(LLAMA, run, "H100") for run in runs)
    assert half.step_seconds / eight.step_seconds == pytest.approx(112388 / 85459, abs=0.08)
    assert half.step_seconds_low < 128 * 8192 / 85459 < half.step_seconds_high
    assert eight.step_seconds_low < 128 * 8192 / 112388 < eight.step_seconds_high


def test_fp8_of_transformer_engine_where_it_cannot_be():
    with pytest.raises(lab.SpecError, match="A100-80GB has no fp8 units"):
        lab.estimate(LLAMA, engine("delayed"), "A100")
    with pytest.raises(lab.SpecError, match="H100-80GB has no units for mxfp8"):
        lab.estimate(LLAMA, engine("mxfp8"), "H100")
    assert lab.estimate(LLAMA, engine("mxfp8"), "B200").step_seconds
    with pytest.raises(lab.SpecError, match="transformer_engine=False"):
        lab.Megatron(fp8_recipe="delayed", transformer_engine=False)
    with pytest.raises(lab.SpecError, match="'rowwise'"):
        lab.Megatron(fp8_recipe="rowwise")
    with pytest.raises(lab.SpecError, match="fp8_param_gather=True needs fp8_recipe"):
        lab.Megatron(fp8_param_gather=True)
    with pytest.raises(lab.SpecError, match="fp8_param_gather=True with zero=0"):
        engine("delayed", True, dp=2)
