"""megatron-core's own layers, buffers, optimizer and schedules on fake tensors, and the estimate beside them, rank by
rank of a pipeline; where `make stacks` put the package."""

import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import llmlab as lab
from llmlab.base.units import show_bytes
from llmlab.formulas.memory.megatron_step import MegatronMemory
from llmlab.formulas.memory.share import share_of
from llmlab.recording.parts import divide
from llmlab.simulation import stacks
from llmlab.simulation.report import recorded

CARD = "A100-80GB"
GPT = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 512, "n_layer": 8, "n_head": 8}
LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "intermediate_size": 1024, "num_hidden_layers": 4, "num_local_experts": 8,
           "num_experts_per_tok": 2}  # fmt: skip
FEW_WORDS = {**MIXTRAL, "vocab_size": 1000}  # the loss is not the peak
FEW_WORDS_DENSE = {**LLAMA, "vocab_size": 1000, "intermediate_size": 4096}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 128, "vocab_size": 1000}  # 8 heads, twice as wide as the stream
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4,
             "moe_intermediate_size": 256}  # fmt: skip
NAME = "megatron:transformer_engine=False"
EXPERTS = f"{NAME},moe_expert_capacity_factor=1"
UNFUSED = {"micro_batch": 32, "seq_len": 256, "stack": f"{NAME},bias_swiglu_fusion=False"}
PIPELINE = {"pp": 4, "accumulation": 4}
INTERLEAVED = {"pp": 4, "accumulation": 8, "stack": f"{NAME},virtual_pipeline=2"}
RUNS = {  # the model, the run, and the stage
    "GPT": (GPT, {}, 0),
    "GPT in fp16": (GPT, {"precision": "mixed-fp16"}, 0),
    "GPT in fp16, short": (GPT, {"micro_batch": 1, "seq_len": 64, "precision": "mixed-fp16"}, 0),
    "GPT, short": (GPT, {"micro_batch": 1, "seq_len": 64}, 0),
    "GPT, short, without Apex": (GPT, {"micro_batch": 1, "seq_len": 64, "stack": f"{NAME},apex=False"}, 0),
    "GPT, tensor and sequence parallel, sharded": (GPT, {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 1}, 0),
    "GPT, core attention again": (GPT, {"checkpointing": "selective"}, 0),
    "GPT, all again": (GPT, {"stack": f"{NAME},recompute=full,recompute_num_layers=4"}, 0),
    "GPT, three layers again": (GPT, {"stack": f"{NAME},recompute=full,recompute_method=block,"
                                               "recompute_num_layers=3"}, 0),
    "GPT, pipeline, first": (GPT, PIPELINE, 0),
    "GPT, pipeline, third": (GPT, PIPELINE, 2),
    "GPT, pipeline, last": (GPT, PIPELINE, 3),
    "GPT, interleaved, first": (GPT, INTERLEAVED, 0),
    "GPT, interleaved, second": (GPT, INTERLEAVED, 1),
    "GPT, interleaved, last": (GPT, INTERLEAVED, 3),
    "Llama": (LLAMA, {}, 0),
    "Llama, sharded, accumulated": (LLAMA, {"dp": 8, "zero": 1, "accumulation": 2}, 0),
    "Llama, tensor parallel": (LLAMA, {"tp": 2}, 0),
    "Llama, attention and MLP again": (LLAMA, {"stack": lab.Megatron(
        transformer_engine=False, recompute="selective", recompute_modules=("core_attn", "mlp"))}, 0),
    "Llama without Apex": (LLAMA, {"stack": f"{NAME},apex=False"}, 0),
    "Llama, SwiGLU not fused": (LLAMA, {"stack": UNFUSED["stack"]}, 0),
    "Llama of few words, SwiGLU not fused": (FEW_WORDS_DENSE, UNFUSED, 0),
    "Llama of few words, SwiGLU not fused, all again": (FEW_WORDS_DENSE, {**UNFUSED, "checkpointing": "full"}, 0),
    "Llama, loss compiled": (LLAMA, {"stack": f"{NAME},cross_entropy_fusion_impl=native"}, 0),
    "Llama, pipeline, first": (LLAMA, PIPELINE, 0),
    "Llama, pipeline, second": (LLAMA, PIPELINE, 1),
    "Llama, pipeline, last": (LLAMA, PIPELINE, 3),
    "Llama, interleaved, all again, sharded, third": (
        LLAMA, {**INTERLEAVED, "stack": f"{NAME},virtual_pipeline=2,recompute=full", "dp": 2, "zero": 1}, 2),
    "Qwen3": (QWEN3, {}, 0),
    "Qwen3, tensor parallel": (QWEN3, {"tp": 2}, 0),
    "Qwen3, core attention again": (QWEN3, {"checkpointing": "selective"}, 0),
    "Qwen3 without Apex": (QWEN3, {"stack": f"{NAME},apex=False"}, 0),
    "Qwen3, a key for each query": ({**QWEN3, "num_key_value_heads": 8}, {}, 0),
    "Qwen3 MoE": (QWEN3_MOE, {"stack": EXPERTS}, 0),
    "Qwen3 MoE, experts on eight, sharded": (QWEN3_MOE, {"dp": 8, "ep": 8, "zero": 1, "stack": EXPERTS}, 0),
    "Qwen3 MoE, pipeline, third": (QWEN3_MOE, {**PIPELINE, "dp": 2, "ep": 2, "stack": EXPERTS}, 2),
    "Mixtral": (MIXTRAL, {"stack": EXPERTS}, 0),
    "Mixtral, experts in twos on four, sharded": (MIXTRAL, {"dp": 4, "ep": 2, "zero": 1, "stack": EXPERTS}, 0),
    "Mixtral, room to spare": (MIXTRAL, {"dp": 4, "ep": 4, "stack": f"{NAME},moe_expert_capacity_factor=1.5"}, 0),
    "Mixtral of few words, experts on four": (FEW_WORDS, {"dp": 4, "ep": 4, "stack": EXPERTS}, 0),
    "Mixtral of few words, all again": (FEW_WORDS, {"dp": 4, "ep": 4, "checkpointing": "full", "stack": EXPERTS}, 0),
    "Mixtral, pipeline, last": (MIXTRAL, {**PIPELINE, "dp": 2, "ep": 2, "stack": EXPERTS}, 3),
}  # fmt: skip
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs `make stacks`")


def training(**given):
    return lab.Training(**{"micro_batch": 2, "seq_len": 1024, "stack": NAME, **given})


def simulated(model, run, stage=0):
    return recorded(lab.model(model), run, CARD, stage=stage)


def peak(step):
    return divide(step.engine.events, step.marks)


@needs_megatron
@pytest.mark.parametrize("name", RUNS)
def test_the_estimate_is_what_megatrons_own_code_takes(name):
    model, given, stage = RUNS[name]
    run = training(**given)
    estimate = MegatronMemory(share_of(lab.model(model), run, lab.gpu(CARD), stage=stage)).moments()
    simulation = peak(simulated(model, run, stage)).peak
    assert max(moment.total for moment in estimate) == pytest.approx(simulation, rel=0.02)


@needs_megatron
def test_the_last_stage_has_the_logits_twice_and_a_copy_of_the_table():
    """What it holds beside its layers: the logits in half, as the head makes them, and in fp32, in whose place softmax
    and the gradient are computed; weights, gradients and optimizer states of the tied head, whose all-reduce with the
    first stage's embedding is in place."""
    run = training(**PIPELINE, dp=2, zero=1)
    middle, last = (simulated(GPT, run, stage) for stage in (2, 3))
    vocab = 50304  # a multiple of 128
    states = ("weights", "gradients", "optimizer")
    large = sorted(b.size for b in peak(last).blocks if b.size >= 2 * run.tokens * vocab and b.part not in states)
    assert large == pytest.approx([2 * run.tokens * vocab, 4 * run.tokens * vocab], abs=2**20)  # what is split off less
    more = {part: peak(last).parts[part] - peak(middle).parts[part] for part in states}
    table = vocab * 512
    # Of the optimizer's 12 bytes of a parameter one of two ranks has half.
    for part, element in {"weights": 2, "gradients": 4, "optimizer": 6}.items():
        assert more[part] == pytest.approx(element * table, abs=3 * 2**20)  # of three tensors


@needs_megatron
def test_the_report_is_of_all_stages():
    run = training(**PIPELINE)
    report = lab.simulate(LLAMA, run, CARD)
    assert report.outcome == "fits" and report.step_seconds is None and report.notes[1].code == "engine"
    found = {stage: show_bytes(peak(simulated(LLAMA, run, stage)).peak) for stage in (1, 3)}
    assert report.notes[0].code == "other-stages"
    assert f"stage 1 {found[1]}, stage 3 {found[3]}" in report.notes[0]


@needs_megatron
def test_a_stage_that_does_not_fit_is_named():
    run = training(pp=2, accumulation=2, checkpointing="full")  # the last stage, with the logits, holds the most
    card = lab.gpu(CARD)
    first, last = (simulated(GPT, run, stage).peak_reserved for stage in (0, 1))
    assert first < last
    small = replace(card, memory=card.memory - card.room(2) + (first + last) // 2)
    report = lab.simulate(GPT, run, small)
    assert report.outcome == "out of memory" and "in stage 1 of the pipeline" in report.where


@needs_megatron
def test_nothing_of_megatron_stays_behind():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import param_and_grad_buffer

    kept = tensor_parallel.random._lazy_call, param_and_grad_buffer._coalescing_manager
    first = lab.simulate(GPT, training(), CARD).peak_allocated
    assert not parallel_state.model_parallel_is_initialized() and not torch.distributed.is_initialized()
    assert kept == (tensor_parallel.random._lazy_call, param_and_grad_buffer._coalescing_manager)
    assert not any(name.endswith("softmax_cuda") for name in sys.modules)
    assert lab.simulate(GPT, training(), CARD).peak_allocated == first


@needs_megatron
@pytest.mark.parametrize(("given", "message"), [
    ({"stack": "megatron"}, "no layers of Transformer Engine"),
    ({"stack": f"{NAME},cross_entropy_fusion_impl=te"}, "no loss of Transformer Engine"),
    ({"stack": f"{NAME},use_precision_aware_optimizer=true", "dp": 2, "zero": 1}, "no Transformer Engine's Adam"),
    ({"stack": f"{NAME},distributed_fused_adam=bf16", "dp": 2, "zero": 1}, "no Apex's Adam"),
    ({"stack": f"{NAME},defer_embedding_wgrad_compute=true", "pp": 2}, "no Apex's fused weight gradient"),
    ({"tp": 4}, "does not divide custom-llama's 2 key-value heads"),
])  # fmt: skip
def test_what_of_megatron_is_only_estimated(given, message):
    run = training(**given)
    with pytest.raises(lab.NotAvailable, match=message):
        lab.simulate(LLAMA, run, CARD)
    assert lab.estimate(LLAMA, run, CARD).peak_allocated


@needs_megatron
def test_who_gets_which_tokens_is_not_simulated():
    run = training(dp=4, ep=4)
    with pytest.raises(lab.NotAvailable, match="give moe_expert_capacity_factor=1"):
        lab.simulate(MIXTRAL, run, CARD)
    full = training(dp=4, ep=4, stack=EXPERTS)
    assert lab.estimate(MIXTRAL, run, CARD).peak_allocated == lab.estimate(MIXTRAL, full, CARD).peak_allocated


@needs_megatron
def test_experts_on_several_ranks_are_spread_and_their_states_with_them():
    """Of 8 experts a rank of 4 has 2; of states that are sharded only copies share, which there are not."""
    spread = peak(simulated(MIXTRAL, training(dp=4, ep=4, zero=1, stack=EXPERTS))).parts
    whole = peak(simulated(MIXTRAL, training(dp=4, zero=1, stack=EXPERTS))).parts
    experts = 4 * 8 * 3 * 512 * 1024  # parameters: layers, experts, matrices
    for part, more in {"weights": 2 * 3 / 4, "gradients": 4 * 3 / 4, "optimizer": 0}.items():
        assert whole[part] - spread[part] == pytest.approx(more * experts, abs=0.1 * experts)


@needs_megatron
@pytest.mark.parametrize(("tp", "dp", "ep", "whole"), [(2, 4, 8, True), (2, 4, 2, False), (1, 8, 4, False)])
def test_megatrons_own_ranks_share_experts(tp, dp, ep, whole):
    """Its generator of expert ranks lays out neighbours as `expert_stride` says, also where ep exceeds dp."""
    from megatron.core.parallel_state import RankGenerator

    stack = lab.Megatron(expert_tensor_parallel_size=1 if whole else None)
    run = lab.Training(dp=dp, tp=tp, ep=ep, pp=2, accumulation=2, sequence_parallel=tp > 1, stack=stack)
    share = run.expert_tp
    own = RankGenerator(tp=share, ep=ep, dp=dp * tp // (share * ep), pp=2, cp=1, order="tp-cp-ep-dp-pp")
    assert own.get_ranks("ep")[0] == [run.expert_stride * rank for rank in range(ep)]


def test_without_megatron_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(stacks, "find_spec", lambda name: None)
    with pytest.raises(lab.NotAvailable, match=r"needs megatron-core 0\.16\.1: pip install megatron-core==0.*`make st"):
        lab.simulate(GPT, training(), CARD)
    assert lab.estimate(GPT, training(), CARD).peak_allocated
