"""All modules of simulation/stacks on fake tensors, beside the estimate; where `make stacks` put their packages."""

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import NamedTuple

import pytest

import llmlab as lab
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.memory.states import states
from llmlab.recording.parts import divide
from llmlab.simulation import stacks
from llmlab.simulation.report import recorded
from llmlab.specs.stages import chunks_of


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason="needs `make stacks`, or llmlab[distributed]")


SMALL = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {**SMALL, "model_type": "qwen3", "head_dim": 64}
RUNS = {
    "by name": {"dp": 8},
    "full": {"dp": 8, "checkpointing": "full"},
    "none": {"dp": 8, "stack": "torchtitan:ac=none"},
    "layers": {"dp": 8, "stack": "torchtitan:ac=selective_layers"},
    "tensor parallel": {"dp": 4, "tp": 2},
    "never resharded": {"dp": 8, "stack": "torchtitan:reshard_after_forward=never"},
    "always resharded": {"dp": 8, "stack": "torchtitan:reshard_after_forward=always,optimizer=foreach"},
    "accumulated": {"dp": 8, "accumulation": 2, "micro_batch": 2},
    "copies": {"dp": 8, "dp_replicate": 2},
    "as until 0.2.0": {"dp": 8, "stack": "torchtitan:keeps_attention=False"},
}
# Of few words, so that the peak is where a block is: what it keeps is seen.
THIN = {**SMALL, "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
THIN_QWEN = {**THIN, "model_type": "qwen3", "num_attention_heads": 12, "head_dim": 128}
FEW, FEW_QWEN = ({**each, "vocab_size": 1024, "num_hidden_layers": 2} for each in (THIN, THIN_QWEN))
DEEP = {**THIN, "vocab_size": 1024}
COMPILED = {"dp": 8, "compile": True}
WIDER = {**FEW, "hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 16, "num_key_value_heads": 4}
SEVERAL = {"micro_batch": 2, "seq_len": 4096}
EIGHTH, WIDE = {**COMPILED, "fp8": "tensorwise"}, "torchtitan:enable_fsdp_float8_all_gather=False"
BLOCKS = {
    "context parallel": (SMALL, {"dp": 2, "cp": 2}),
    "context parallel, alone": (THIN_QWEN, {"cp": 4}),
    "context parallel, none": (THIN, {"dp": 2, "cp": 2, "stack": "torchtitan:ac=none"}),
    "context parallel, full": (THIN, {"dp": 2, "cp": 2, "checkpointing": "full"}),
    "compiled": (THIN, COMPILED),
    "compiled, none": (THIN_QWEN, {**COMPILED, "stack": "torchtitan:ac=none"}),
    "compiled, full": (THIN, {**COMPILED, "checkpointing": "full"}),
    "compiled, many words": (SMALL, COMPILED),
    "compiled but for the loss": (SMALL, {**COMPILED, "stack": "torchtitan:compile_loss=False"}),
    "tensorwise": (THIN, EIGHTH),
    "tensorwise, none": (THIN, {**EIGHTH, "stack": "torchtitan:ac=none"}),
    "tensorwise, full": (THIN, {**EIGHTH, "checkpointing": "full"}),
    "tensorwise, gathered in bf16": (THIN, {**EIGHTH, "stack": WIDE}),
    "tensorwise, tensor parallel, none": (FEW, {**EIGHTH, "dp": 4, "tp": 2, "stack": "torchtitan:ac=none"}),
    "tensorwise, several sequences": (WIDER, {**EIGHTH, "stack": "torchtitan:ac=full", **SEVERAL}),
    "tensorwise, several sequences, tensor parallel": (WIDER, {**EIGHTH, "tp": 2, **SEVERAL}),
    "rowwise": (THIN, {**EIGHTH, "fp8": "rowwise"}),
    "rowwise, none": (THIN, {**EIGHTH, "fp8": "rowwise", "stack": "torchtitan:ac=none"}),
    "norms written out": (THIN, {"dp": 8, "stack": "torchtitan:norm_type=rmsnorm"}),
    "norms written out, qwen3": (THIN_QWEN, {"dp": 8, "stack": "torchtitan:ac=none,norm_type=rmsnorm"}),
}
# Cut in eight, and no wider than h: what each rank gathered is most, and its gradients.
BLOCKS["compiled, cut in eight"] = (
    {**FEW, "hidden_size": 2048, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8},
    {"dp": 16, "tp": 8, "seq_len": 4096, "compile": True},
)
# Of few tokens: the gradients of all a block's weights are there as its backward ends.
HEAVY_WEIGHTS = {**FEW, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "num_hidden_layers": 3}  # fmt: skip
# Where little is asked of the head, all moments of a block's backward are seen.
HEIGHTS = {
    "context and tensor parallel": (FEW, {"dp": 2, "cp": 2, "tp": 2}),
    "context parallel, few words": (FEW, {"dp": 2, "cp": 2}),
    "context parallel, wide heads": ({**FEW, "hidden_size": 1536, "intermediate_size": 2048}, {"cp": 2}),
    "context parallel, ungrouped heads": ({**FEW, "num_key_value_heads": 8}, {"cp": 2}),
    "context parallel, qwen3, full": (FEW_QWEN, {"cp": 2, "micro_batch": 2, "checkpointing": "full"}),
    "the ring, few tokens": (FEW_QWEN, {"cp": 2, "dp": 4, "seq_len": 1024, "checkpointing": "full"}),
    "tensor parallel, few words": (FEW, {"dp": 4, "tp": 2}),
    "tensor parallel, few words, none": (FEW, {"dp": 4, "tp": 2, "stack": "torchtitan:ac=none"}),
    "few words": (FEW, {"dp": 8, "micro_batch": 2, "seq_len": 4096}),
    "few words, layers": (FEW, {"dp": 8, "stack": "torchtitan:ac=selective_layers"}),
    "few tokens": (DEEP, {"dp": 8, "seq_len": 512}),
    "one GPU, none": (FEW, {"stack": "torchtitan:ac=none", "seq_len": 2048}),
    "one GPU, selective": (FEW, {"seq_len": 2048}),
    "tensor parallel alone": (FEW, {"tp": 2, "seq_len": 2048}),
    "compiled, few words": (FEW_QWEN, {**COMPILED, "micro_batch": 2, "seq_len": 2048}),
    "compiled, few tokens": (FEW, {**COMPILED, "seq_len": 1024}),
    "compiled, few tokens, heavy weights, none": (
        HEAVY_WEIGHTS, {**COMPILED, "dp": 16, "seq_len": 1024, "stack": "torchtitan:ac=none"},
    ),
    "fp8, one of two layers, few tokens": (
        {**HEAVY_WEIGHTS, "num_hidden_layers": 4},
        {**EIGHTH, "seq_len": 512, "stack": "torchtitan:ac=selective_layers"},
    ),
    "compiled, context parallel": (FEW, {"dp": 2, "cp": 2, "compile": True}),
    "compiled, tensor parallel": (FEW_QWEN, {"dp": 2, "tp": 2, "compile": True}),
    "compiled, context and tensor parallel": (FEW, {"dp": 2, "cp": 2, "tp": 2, "compile": True}),
    "tensor parallel, the embedding's sums": (
        {**FEW, "vocab_size": 128256, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8},
        {"dp": 16, "tp": 8, "checkpointing": "full"},
    ),
}

EXPERTS = {
    **THIN_QWEN, "model_type": "qwen3_moe", "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
}  # fmt: skip
MIXTURE = {"dp": 4, "seq_len": 2048, "stack": "torchtitan:ac=none"}
# Of few words, and with experts whose weights are small beside their tokens, or large.
MIXED = {**EXPERTS, "vocab_size": 1024, "num_hidden_layers": 3}
HEAVY = {**MIXED, "moe_intermediate_size": 768, "num_experts": 64}
MIXTURES = {
    "none": (MIXED, {}),
    "full": (MIXED, {"stack": "torchtitan:ac=full"}),
    "selective": (MIXED, {"stack": "torchtitan"}),
    "tensor parallel, selective": (MIXED, {"tp": 2, "stack": "torchtitan"}),
    "more ranks than experts": (MIXED, {"dp": 24}),
    "heavy": (HEAVY, {}),
    "expert groups": (HEAVY, {"ep": 2}),
    "expert groups, full": (HEAVY, {"ep": 4, "dp": 16, "stack": "torchtitan:ac=full"}),
    "expert groups, the busiest": (HEAVY, {"ep": 2, "expert_imbalance": 1.5}),
    "one group of all": (HEAVY, {"ep": 4}),
    "one group of all, the busiest": (MIXED, {"ep": 4, "expert_imbalance": 3}),
    "expert groups, never resharded": (HEAVY, {"ep": 2, "stack": "torchtitan:reshard_after_forward=never,ac=full"}),
    "expert groups, tensor parallel": (MIXED, {"ep": 2, "tp": 2, "stack": "torchtitan:ac=full"}),
    "one of two layers": (MIXED, {"ep": 2, "stack": "torchtitan:ac=selective_layers"}),
    "expert groups, selective": (MIXED, {"ep": 4, "stack": "torchtitan"}),
    "compiled": (MIXED, {"compile": True}),
    "compiled, few tokens": (MIXED, {"compile": True, "dp": 16, "seq_len": 512}),
    "compiled, full": (MIXED, {"compile": True, "stack": "torchtitan:ac=full"}),
    "compiled, expert groups, selective": (MIXED, {"compile": True, "ep": 4, "stack": "torchtitan"}),
}

TIED = {**SMALL, "tie_word_embeddings": True}
MLP = lab.LoRA(rank=8, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
TUNES = {
    "by name": {},
    "on eight": {"dp": 8},
    "on eight, never resharded": {"dp": 8, "stack": "torchtune:fsdp_reshard_after_forward=False"},
    "on eight, in backward": {"dp": 8, "stack": "torchtune:optimizer_in_bwd=True"},
    "AdamW after backward": {"stack": "torchtune:optimizer=AdamW,optimizer_in_bwd=False"},
    "8-bit": {"stack": "torchtune:optimizer=AdamW8bit"},
    "accumulated": {"accumulation": 2},
    "nothing recomputed": {"stack": "torchtune:enable_activation_checkpointing=False"},
    "whole logits": {"stack": "torchtune:num_output_chunks=0"},
    "offloaded": {"stack": "torchtune:enable_activation_offloading=True"},
    "LoRA": {"lora": MLP},
    "LoRA on eight": {"dp": 8, "lora": MLP},
    "QLoRA": {"lora": MLP, "quantization": "nf4"},
    "QLoRA, offloaded": {"lora": MLP, "quantization": "nf4", "stack": "torchtune:enable_activation_offloading=True"},
}
DROPPED, QKV = lab.LoRA(targets=("q_proj", "v_proj"), dropout=0.1), lab.LoRA(targets=("q_proj", "k_proj", "v_proj"))
LITGPT = {
    "whole": {},
    "whole, of several sequences": {"micro_batch": 2},
    "whole, accumulated": {"accumulation": 3, "seq_len": 1024},
    "whole, on eight": {"dp": 8},
    "whole, on many, few tokens": {"dp": 16, "seq_len": 512},
    "whole, on eight, accumulated": {"dp": 8, "accumulation": 3},
    "LoRA": {"lora": DROPPED, "micro_batch": 2},
    "LoRA of q, k and v": {"lora": QKV},
    "LoRA of all": {"lora": lab.LoRA(targets=(*MLP.targets, "k_proj"))},
    "LoRA on eight": {"dp": 8, "lora": DROPPED},
    "LoRA on eight, in blocks that are not split": {"dp": 8, "lora": DROPPED, "accumulation": 2, "micro_batch": 2},
}
OFFLOADED = "torchtune:enable_activation_offloading=True"
KEEPING = "torchtune:enable_activation_checkpointing=False"
WET = lab.LoRA(rank=8, targets=MLP.targets, dropout=0.1)
BLOCK_HEIGHTS = {
    "compiled": {"compile": True},
    "compiled, nothing recomputed": {"compile": True, "stack": KEEPING, "seq_len": 1024},
    "compiled, AdamW after backward": {"compile": True, "stack": "torchtune:optimizer=AdamW,optimizer_in_bwd=False"},
    "compiled, LoRA": {"compile": True, "lora": MLP},
    "on eight": {"dp": 8},
    "LoRA": {"lora": MLP},
    "offloaded": {"seq_len": 2048, "stack": OFFLOADED},
    "offloaded, LoRA": {"seq_len": 2048, "stack": OFFLOADED, "lora": MLP},
    "offloaded, compiled": {"seq_len": 2048, "stack": OFFLOADED, "compile": True},
    "LoRA, dropout": {"lora": WET},
    "QLoRA": {"lora": MLP, "quantization": "nf4"},
    "QLoRA of attention": {"lora": QKV, "quantization": "nf4"},
    "QLoRA, dropout": {"lora": WET, "quantization": "nf4"},
}  # fmt: skip
FROZEN = {  # all of them on ranks of FSDP2, adapters alone are trained, and nothing is recomputed
    # One block is gathered as the final norm's backward runs, whose own gradients are many.
    "the final norm": ({**THIN, "hidden_size": 4096, "intermediate_size": 4096, "num_attention_heads": 32},
                       {"lora": QKV, "seq_len": 4096}),
    # As FSDP2 gathers a frozen head again, the gradients of all its chunks are there.
    "the head": ({**THIN, "num_hidden_layers": 2, "vocab_size": 64_000},
                 {"lora": QKV, "seq_len": 512, "micro_batch": 2}),
}  # fmt: skip
COMPILED_QLORA = {
    "recomputed": {"lora": MLP, "seq_len": 4096, "micro_batch": 2},
    "few tokens": {"lora": MLP, "seq_len": 512},
    "dropout": {"lora": WET, "seq_len": 4096, "micro_batch": 2},
    "attention": {"lora": QKV, "seq_len": 1024},
    "nothing recomputed": {"lora": MLP, "seq_len": 1024, "stack": KEEPING},
}


class Case(NamedTuple):
    """A run with a stack: how far the estimate of its peak, and of some phases, may be from its simulation."""

    model: dict
    given: dict
    gpu: str = "A100-80GB"
    rel: float = 0.02
    phases: Mapping[str, float] = MappingProxyType({})
    highest: str = ""  # the phase with the peak


H100, TITAN, TUNE = "H100-80GB", {"stack": "torchtitan", "seq_len": 4096}, {"stack": "torchtune", "seq_len": 4096}
TWO = {"micro_batch": 2}
EIGHT_LAYERS = {**SMALL, "num_hidden_layers": 8}  # over four stages: 2, 3, 2, 1
CASES = {
    **{f"torchtitan, {kind}, {name}": Case(model, {**TITAN, **given}, H100)
       for name, given in RUNS.items() for kind, model in (("llama", SMALL), ("qwen3", QWEN))},
    **{f"torchtitan, {name}": Case(model, {**TITAN, "seq_len": 8192, **given}, H100, rel)
       for table, rel in ((BLOCKS, 0.02), (HEIGHTS, 0.01)) for name, (model, given) in table.items()},
    **{f"torchtitan's experts, {name}": Case(model, {**MIXTURE, **given}, H100, 0.01, {"forward": 0.03})
       for name, (model, given) in MIXTURES.items()},
    **{f"torchtune, {kind}, {name}": Case(model, {**TUNE, **TWO, **given})
       for name, given in TUNES.items() for kind, model in (("llama", SMALL), ("tied", TIED))},
    **{f"torchtune's blocks, {name}": Case(FEW, {**TUNE, **TWO, **given}) for name, given in BLOCK_HEIGHTS.items()},
    **{f"torchtune, all-gathers before backward, {name}": Case(model, {**TUNE, "dp": 8, **given}, highest="backward")
       for name, (model, given) in FROZEN.items()},
    **{f"torchtune's compiled QLoRA keeps what it dequantized, {name}": Case(
        WIDER, {**TUNE, "compile": True, "quantization": "nf4", **given}, rel=0.01,
        phases={} if given.get("stack") == KEEPING else {"forward": 0.03},
    ) for name, given in COMPILED_QLORA.items()},
    "torchtune, on eight, offloaded, the last five inputs": Case(
        {**EIGHT_LAYERS, "hidden_size": 2048, "intermediate_size": 2048, "vocab_size": 1024},
        {"dp": 8, "lora": QKV, "stack": OFFLOADED, "seq_len": 512, "checkpointing": "full"}, H100,
    ),
    "torchtune, on eight, all-gathers end with the model": Case(
        {**SMALL, "hidden_size": 1024, "intermediate_size": 4096},
        {"dp": 8, "lora": WET, "stack": "torchtune:fsdp_reshard_after_forward=False", "seq_len": 1024}, H100,
    ),
    # 11 MiB each, of w1, w2 and w3 on two ranks, in blocks of 12; 9 % of the bytes of weights and states.
    "torchtune, whole blocks of the allocator for shards and states": Case(
        {**EIGHT_LAYERS, "hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 1024},
        {"dp": 2, "seq_len": 512, "stack": "torchtune:optimizer_in_bwd=True"}, phases={"load": 0.01},
    ),
    "torchtune, dequantizing in a block": Case(
        THIN, {"seq_len": 2048, **TWO, "lora": MLP, "quantization": "nf4", "stack": "torchtune"}, highest="backward"
    ),
    **{f"litgpt, {kind}, {name}": Case(model, {"stack": "litgpt", "seq_len": 4096, **given})
       for name, given in LITGPT.items()
       for kind, model in (("grouped heads", SMALL), ("few words", {**THIN, "num_key_value_heads": 8}))},
    "litgpt, the first micro-batch of two joins the head's gradients with no earlier ones": Case(
        {**THIN, "vocab_size": 32_000, "num_hidden_layers": 12},
        {"dp": 8, "accumulation": 2, "seq_len": 512, "stack": "litgpt"},
    ),
    # In fp32, 1024 × 32000 for 2 × 2048 × 32000 of embedding and head in half.
    "litgpt, the last micro-batch's logits while FSDP gathers": Case(
        {**THIN, "vocab_size": 32_000, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
         "num_hidden_layers": 3},
        {"dp": 2, "accumulation": 2, **TWO, "seq_len": 512, "lora": QKV, "stack": "litgpt"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=needs(case.given["stack"].partition(":")[0]), id=name) for name, case in CASES.items()
])  # fmt: skip
def test_the_estimate_is_what_a_stacks_own_code_takes(case, agree):
    _, simulation = agree(case.model, lab.Training(**case.given), case.gpu, case.rel, **case.phases)
    assert not [note for note in simulation.notes if note.code == "ran-eager"]
    assert not case.highest or simulation.phases[case.highest] == simulation.peak_allocated


@pytest.mark.parametrize(
    "given, names",
    [
        ({"tp": 2}, "tp=2 alone of qwen3"),
        ({"dp": 4, "tp": 2, "compile": True, "checkpointing": "full"}, "compile=True, tp=2 of blocks recomputed whole"),
    ],
)
@needs("torchtitan")
def test_what_of_torchtitan_is_only_estimated(given, names):
    run, model = lab.Training(stack="torchtitan", **given), QWEN if "qwen3" in names else SMALL
    with pytest.raises(lab.NotAvailable, match=rf"{names} with stack='torchtitan'; ask lab\.estimate"):
        lab.simulate(model, run, H100)
    assert lab.estimate(model, run, H100).peak_allocated


PIPELINE = {"dp": 2, "pp": 4, "accumulation": 8, "seq_len": 4096, "stack": "torchtitan:ac=none"}
VIRTUAL, HALF = {**PIPELINE, "virtual_stages": 2}, {"dp": 2, "pp": 2, "seq_len": 1024, "stack": "torchtitan:ac=full"}
TEN, EIGHTEEN = ({**THIN, "num_hidden_layers": layers} for layers in (10, 18))
ELEVEN = {**SMALL, "vocab_size": 2048, "num_hidden_layers": 11}
EVERY_SECOND = "torchtitan:ac=selective_layers"
STAGES = {  # the model, the run, the stage, and how far its estimate may be
    "first": (EIGHT_LAYERS, PIPELINE, 0, 0.02),
    "second": (EIGHT_LAYERS, PIPELINE, 1, 0.02),
    "last": (EIGHT_LAYERS, PIPELINE, 3, 0.02),
    "GPipe, first": (EIGHT_LAYERS, {**PIPELINE, "schedule": "gpipe"}, 0, 0.02),
    "few tokens, as many micro-batches as stages": (
        EIGHT_LAYERS, {**PIPELINE, "accumulation": 4, "seq_len": 512}, 0, 0.02
    ),
    "tensor parallel": (EIGHT_LAYERS, {**PIPELINE, "tp": 2}, 0, 0.02),
    "always resharded": (
        EIGHT_LAYERS, {**PIPELINE, "stack": "torchtitan:ac=none,reshard_after_forward=always"}, 1, 0.02
    ),
    "interleaved": (EIGHT_LAYERS, VIRTUAL, 0, 0.02),
    "copies": (
        EIGHT_LAYERS, {**PIPELINE, "dp": 4, "dp_replicate": 2, "stack": "torchtitan:ac=full", "seq_len": 1024}, 1, 0.02
    ),
    "compiled": (EIGHT_LAYERS, {**PIPELINE, "compile": True}, 1, 0.02),
    "context parallel, first": (EIGHT_LAYERS, {**PIPELINE, "cp": 2}, 0, 0.02),
    # Whole gradients are added, and reduced when all micro-batches are through.
    "the embedding's gradient, added whole": (EIGHT_LAYERS, {**PIPELINE, "tp": 2, "seq_len": 512}, 0, 0.006),
    "the head's, reduced after those of blocks": (EIGHT_LAYERS, {**PIPELINE, "seq_len": 128}, 3, 0.006),
    "the second block, of three one of which is recomputed": (
        EIGHT_LAYERS,
        {**PIPELINE, "schedule": "gpipe", "accumulation": 4, "stack": EVERY_SECOND, "seq_len": 2048}, 1, 0.006,
    ),
    # 18 layers: 2 and 2, 3 and 2, 3 and 2, 3 and 1. A virtual stage has gradients when it has run backward, and nothing
    # is gathered again after the first micro-batch.
    **{f"virtual stage {stage}, {seq_len} tokens": (EIGHTEEN, {**VIRTUAL, "seq_len": seq_len}, stage, 0.01)
       for stage in range(4) for seq_len in (512, 4096)},
    # 3 layers and 2, of which the second and fourth are recomputed: more of those kept whole are in the first.
    "a block is recomputed by its number on the rank": (EIGHTEEN, {**VIRTUAL, "stack": EVERY_SECOND}, 1, 0.01),
    # The last stage's buffers, head and reduced gradients. With as many micro-batches as stages, the later virtual
    # stage's gradients are reduced before the other's come.
    **{f"last of two, {accumulation} micro-batches, virtual stages {virtual}": (
        TEN, {**HALF, "accumulation": accumulation, "virtual_stages": virtual}, 1, 0.003
    ) for accumulation, virtual in ((4, 1), (2, 2), (4, 2))},
    # 11 layers in eight: 1, 2, 2, 2, 2, 1, 1, 0; the last rank keeps most when its last virtual stage is done.
    **{f"unequal virtual stages, {stage}": (ELEVEN, {**VIRTUAL, "seq_len": 2048}, stage, 0.02) for stage in (0, 3)},
}  # fmt: skip


def of_stage(model, given, stage):
    spec, run = lab.model(model), lab.Training(**given)
    return spec, run, recorded(spec, run, H100, stage=stage)


@needs("torchtitan")
@pytest.mark.parametrize("name", STAGES)
def test_the_estimate_is_what_a_stage_of_torchtitans_pipeline_takes(name):
    *given, rel = STAGES[name]
    spec, run, step = of_stage(*given)
    estimate = max(moment.total for moment in training_moments(spec, run, lab.gpu(H100), stage=given[-1]))
    assert estimate == pytest.approx(divide(step.engine.events, step.marks).peak, rel=rel)


@pytest.mark.parametrize(("model", "stage", "chunks"), [
    (EIGHTEEN, 1, (3, 2)), (ELEVEN, 0, (1, 2)), (ELEVEN, 3, (2, 0)),
])  # fmt: skip
def test_virtual_stages_differ_in_their_numbers_of_layers(model, stage, chunks):
    assert chunks_of(lab.model(model), lab.Training(**VIRTUAL), stage) == chunks


@needs("torchtitan")
def test_a_stage_receives_into_buffers_for_all_micro_batches():
    """Inputs, and gradients of outputs, of 8 micro-batches: of a stage between others 16, of the first and last 8."""
    buffers = {stage: divide(step.engine.events, step.marks, ()).detail["other"]["communication buffers"]
               for stage in (0, 1, 3)
               for *_, step in [of_stage(EIGHT_LAYERS, {**PIPELINE, "seq_len": 1024}, stage)]}  # fmt: skip
    buffer = 1024 * 512 * 2
    assert buffers[0] == buffers[3] == 8 * buffer and buffers[1] == 16 * buffer


@needs("torchtitan")
def test_the_report_is_of_all_stages_of_torchtitans_pipeline():
    report = lab.simulate(EIGHT_LAYERS, lab.Training(**{**PIPELINE, "seq_len": 512}), H100)
    assert report.outcome == "fits" and [note.code for note in report.notes[:2]] == ["other-stages", "pipeline"]


@needs("torchtitan")
@pytest.mark.parametrize("given", [{}, {"ep": 2}, {"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 2, "dp_replicate": 2}])
def test_a_rank_of_torchtitans_experts_holds_its_share_of_them_and_of_the_tokens(given):
    """12 bytes for each parameter of its shards, in fp32; balanced, what a group's ranks send to one is as much as
    each has: its tokens, once for each of their experts, in groups padded by 8 for each expert of the rank."""
    spec, run = lab.model(EXPERTS), lab.Training(**{**MIXTURE, **given})
    step = recorded(spec, run, H100)
    memory = divide(step.engine.events, step.marks)
    in_shards = memory.parts["weights"] + memory.parts["optimizer"]
    assert in_shards == pytest.approx(12 * states(spec, run).trained, rel=0.01)
    rows = run.tokens * spec.experts_per_token + 8 * spec.experts // run.ep
    permuted = [b.size for b in memory.blocks if b.size == rows * spec.hidden * 2 and b.part == "activations"]
    assert len(permuted) == spec.layers


@needs("torchtitan")
def test_a_compiled_model_leaves_the_experts_of_the_next_as_they_are():
    run = lab.Training(**MIXTURE)
    before = lab.simulate(EXPERTS, run, H100).peak_allocated
    lab.simulate(FEW_QWEN, lab.Training(dp=8, seq_len=1024, compile=True, stack="torchtitan"), H100)
    assert lab.simulate(EXPERTS, run, H100).peak_allocated == before


@pytest.mark.parametrize(
    ("given", "what"), [({"compile": True, "tp": 2}, "compile=True, tp=2"), ({"dp": 1}, "precision='autocast")]
)
def test_what_of_torchtitans_experts_is_not_estimated(given, what):
    with pytest.raises(lab.NotAvailable, match=rf"{what}.* for torchtitan's mixtures of experts, such as"):
        lab.estimate(EXPERTS, lab.Training(**{**MIXTURE, **given}))


@needs("litgpt")
def test_fabric_says_nothing_as_it_is_simulated(capfd, recwarn):
    lab.simulate(SMALL, lab.Training(dp=8, seq_len=512, stack="litgpt"), "A100-80GB")
    assert capfd.readouterr() == ("", "")
    assert not [warning for warning in recwarn if "lightning" in warning.filename]


@needs("torchtitan")
def test_which_layers_torchtitan_recomputes_is_counted_anew_for_each_model():
    run = lab.Training(dp=8, seq_len=1024, stack=EVERY_SECOND)
    first, second = (lab.simulate({**FEW, "num_hidden_layers": 3}, run, H100) for _ in range(2))
    assert first.peak_allocated == second.peak_allocated


@needs("torchtune")
@pytest.mark.parametrize("given", [
    {"lora": MLP, "quantization": "nf4", "dp": 8},
    {"stack": "torchtune:packed=True"},
    {"stack": "torchtune:optimizer=AdamW8bit", "dp": 8},
])  # fmt: skip
def test_what_of_torchtune_is_only_estimated(given):
    run = lab.Training(**{"stack": "torchtune", **given})
    with pytest.raises(lab.NotAvailable, match=r"see lab\.estimate"):
        lab.simulate(SMALL, run, "A100-80GB")
    assert lab.estimate(SMALL, run, "A100-80GB").peak_allocated


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(stacks, "find_spec", lambda name: None)
    with pytest.raises(lab.NotAvailable, match=r"needs torchtitan 0\.2\.2: pip install torchtitan==0"):
        lab.simulate(SMALL, lab.Training(dp=8, stack="torchtitan"), H100)
    assert lab.estimate(SMALL, lab.Training(dp=8, stack="torchtitan"), H100).peak_allocated


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(stacks, "find_spec", lambda name: object())
    monkeypatch.setattr(stacks.metadata, "version", lambda name: "0.3.0")
    with pytest.raises(lab.NotAvailable, match=r"0\.2\.2.* 0\.3\.0 is installed"):
        lab.simulate(SMALL, lab.Training(dp=8, stack="torchtitan"), H100)
