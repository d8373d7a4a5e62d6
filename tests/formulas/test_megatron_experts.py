"""Experts in Megatron-LM: their weights in fp8, their dispatchers, and the host."""

from dataclasses import replace

import pytest

import llmlab as lab
from benchmarks.time.mixtures import ROWS, parts
from benchmarks.time.throughput import errors, predict
from benchmarks.time.throughput_rows import read
from llmlab.formulas.memory.megatron_step import MegatronMemory
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.time.elementwise import moved
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.stacks.megatron import token_copies, window_share
from llmlab.formulas.time.step import product_seconds
from llmlab.specs.stages import layers_of

SPEC = lab.model("Qwen/Qwen3-30B-A3B")
RUN = lab.Training(micro_batch=4, seq_len=4096, accumulation=16, dp=8, ep=8, zero=1, stack="megatron")


def with_options(**options):
    return replace(RUN, stack=replace(RUN.stack, **options))


def time(run, gpu="GB200"):
    return lab.estimate(SPEC, run, gpu).time


def test_each_expert_has_its_weights_in_fp8():
    """Of 128 experts a rank has 16; mxfp8 has a byte for each element and one for each 32, in two layouts."""
    weights = [MegatronMemory(share_of(SPEC, run, lab.gpu("GB200"))).resident["weights"]
               for run in (RUN, with_options(fp8_recipe="mxfp8"))]  # fmt: skip
    experts = SPEC.parameters_by_component["experts"] // 8
    dense = SPEC.parameters_by_component["attention"]
    assert weights[1] - weights[0] == pytest.approx(2 * (1 + 1 / 32) * (experts + dense), rel=1e-6)


def test_the_router_reads_16_bits_and_experts_save_fp8():
    kept = [MegatronMemory(share_of(SPEC, run, lab.gpu("H100"))).whole["linear inputs"]
            for run in (RUN, with_options(fp8_recipe="tensorwise"))]  # fmt: skip
    element = RUN.tokens * SPEC.hidden
    assert kept == [(2 + 2 + 8 * 2) * element, (1 + 2 + 8) * element]


def test_a_flexible_dispatcher_sends_a_token_to_a_rank_once():
    flexible = with_options(moe_flex_dispatcher_backend="hybridep")
    assert [token_copies(SPEC, run, 8) for run in (RUN, flexible)] == [8, pytest.approx(8 * (1 - (7 / 8) ** 8))]
    assert token_copies(SPEC, flexible, 1) == 1
    assert time(flexible)["experts"] < 0.7 * time(RUN)["experts"]


def test_interleaved_passes_hide_communication_with_experts():
    hidden, shown = (time(with_options(overlap_moe_expert_parallel_comm=on))["experts"] for on in (True, False))
    assert 0 < hidden < shown / 2


def test_the_host_waits_for_the_numbers_of_tokens_unless_graphs_or_a_capacity_replace_them():
    """With short micro-batches, launching a forward pass takes longer than running it; the backward pass runs longer,
    but the host cannot launch the next forward pass during it."""
    short = replace(RUN, micro_batch=1)
    waits, graphs, whole, ahead = (
        time(replace(short, stack=replace(RUN.stack, **options)), "B200").get("launches", 0.0)
        for options in ({}, {"cuda_graph_impl": "transformer_engine"}, {"cuda_graph_impl": "full_iteration"},
                        {"moe_expert_capacity_factor": 1.0})
    )  # fmt: skip
    assert waits > graphs > whole == 0 and waits > ahead


def test_the_fused_mlp_moves_nothing_for_swiglu_and_its_casts():
    """Without it, SwiGLU reads 2 widths of 16 bits and writes 1, and its backward pass reads 3 and writes 2. Casts read
    2 bytes and write 2 for each number, of 1 width in the forward pass and of 2 in the backward pass."""
    one, several = (time(with_options(fp8_recipe="mxfp8", use_transformer_engine_op_fuser=on)) for on in (True, False))
    elements = RUN.accumulation * RUN.tokens * SPEC.layers * SPEC.experts_per_token * SPEC.moe_intermediate
    less = (several["elementwise"] - one["elementwise"]) * kernels("GB200").bandwidth
    assert less == pytest.approx((8 * 2 + 3 * 4) * elements) and one["products"] == several["products"]


def test_whole_experts_leave_tensor_parallelism_to_attention():
    many = lab.Training(micro_batch=1, seq_len=4096, accumulation=4, dp=8, tp=2, sequence_parallel=True, ep=16, zero=1,
                        stack="megatron:expert_tensor_parallel_size=1")  # fmt: skip
    dense = lab.Training(micro_batch=1, seq_len=4096, accumulation=4, dp=8, tp=2, sequence_parallel=True, zero=1,
                         stack="megatron")  # fmt: skip
    mixture, same = time(many, "H100"), lab.estimate("Qwen/Qwen3-8B", dense, "H100").time
    streams = SPEC.hidden * SPEC.layers / (4096 * 36)  # of both models
    assert mixture["tensor"] < 0.8 * streams * same["tensor"]


def test_a_layout_has_the_layers_of_each_stage_and_multi_token_prediction():
    """DeepSeek-V3's 61 layers and one module, which adds a layer, and the head with its loss, to the last stage."""
    spec = lab.model("deepseek-ai/DeepSeek-V3")
    layouts = "Et*4|(t*4|)*14tL", "Et*4|(t*4|)*14tmL"
    runs = [lab.Training(micro_batch=1, seq_len=4096, accumulation=8, dp=64, pp=4, ep=64, zero=1, stack=lab.Megatron(
        virtual_pipeline=4, pipeline_model_parallel_layout=layout)) for layout in layouts]  # fmt: skip
    assert [layers_of(spec, run) for run in runs] == [(16, 16, 16, 13), (16, 16, 16, 14)]
    without, module = (product_seconds(spec, run, kernels("GB200")) for run in runs)
    assert module["head"] == 2 * without["head"] and 0 < module["mtp"] < module["head"]
    assert module["experts"] == without["experts"]


def test_latent_attention_and_dense_layers_are_counted():
    """Dense layers of DeepSeek-V3 are as wide as its eight experts and the shared one. Values are narrower than keys,
    so all activations of attention are 2 of 192 and 2 of 128 elements per head, and latents."""
    spec = lab.model("deepseek-ai/DeepSeek-V3")
    run = replace(RUN, micro_batch=1, ep=8)
    kept = MegatronMemory(share_of(spec, run, lab.gpu("GB200"))).whole
    assert kept["mlp"] == 3 * 18432 * 2 * run.tokens
    assert kept["q, k, v"] == 2 * run.tokens * 128 * (192 + 192 + 128)
    again = replace(run, stack=replace(run.stack, recompute="selective", recompute_modules=("mla_up_proj",)))
    more = [product_seconds(spec, one, kernels("GB200"))["attention"] for one in (run, again)]
    up = [kernels("GB200").matmul(4096, n, k, "bf16") for n, k in ((24576, 1536), (32768, 512))]
    assert more[1] - more[0] == pytest.approx(61 * run.accumulation * sum(up))


@pytest.mark.parametrize("given", [
    {"tp": 2, "sequence_parallel": True, "stack": "megatron:expert_tensor_parallel_size=1"}, {"cp": 2},
    {"attention": "eager"}, {"stack": "megatron:transformer_engine=false"},
])  # fmt: skip
def test_latent_attention_is_described_with_whole_heads_in_transformer_engine(given):
    with pytest.raises(lab.SpecError, match="describes deepseek-ai/DeepSeek-V3 with Transformer Engine's layers and"):
        lab.estimate("deepseek-ai/DeepSeek-V3", lab.Training(**{"stack": "megatron", **given}), "H100")


def test_windows_skip_tiles_of_scores():
    """With 4,096 tokens, 32 tiles of queries read 528 tiles of keys, or 63 with a window of one tile."""
    assert window_share(lab.model("openai/gpt-oss-120b"), 4096) == pytest.approx((1 + 63 / 528) / 2)
    assert window_share(lab.model("openai/gpt-oss-120b"), 128) == window_share(SPEC, 4096) == 1


def test_the_activation_of_gpt_oss_is_clamped_by_operators_of_its_own():
    """Recomputing it reads 2 widths and writes 1, and the clamps and their concatenation read 4 and write 4."""
    again = with_options(recompute="selective", recompute_modules=("moe_act",))
    for name, widths in (("openai/gpt-oss-120b", 3 + 8), ("Qwen/Qwen3-30B-A3B", 3)):
        spec = lab.model(name)
        blocks = [moved(spec, run, lab.gpu("GB200")).blocks for run in (RUN, again)]
        inner = spec.layers * spec.experts_per_token * spec.moe_intermediate
        assert blocks[1] - blocks[0] == pytest.approx(RUN.accumulation * RUN.tokens * inner * widths * 2)


def test_published_mixtures_are_predicted():
    """To 15 % at the median, also in the parts that nobody looked at before they were predicted. gpt-oss takes longer
    than predicted, for a reason that is not known."""
    for title, rows in parts(read(ROWS)).items():
        predictions = [(row, predict(row)) for row in rows]
        off = errors(predictions)
        assert off.known == off.rows > 4 and off.inside >= 0.8, title
        of_gpt_oss = [pair for pair in predictions if pair[0].label == "gpt-oss-120b"]
        assert errors([pair for pair in predictions if pair not in of_gpt_oss]).median < 0.15, title
        assert not of_gpt_oss or errors(of_gpt_oss).median < 0.35, title
