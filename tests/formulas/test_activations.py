"""What a block keeps, held to the paper's formula."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.memory.activations import block_saved, korthikanti_block, per_device
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.report import estimated

S, B, H, A = 1024, 2, 768, 12


def megatron_like(**changes) -> lab.ModelSpec:
    """GPT-2's shape with one fused GELU, as Megatron-LM has it."""
    config = {"model_type": "gpt2", "n_embd": H, "n_head": A, "n_layer": 2, "n_positions": S, "vocab_size": 1000,
              "activation_function": "gelu", "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}  # fmt: skip
    return lab.model({**config, **changes})


def kept(run: lab.Training, spec: lab.ModelSpec | None = None) -> int:
    """Bytes one block keeps, without the two fp32 statistics per token of its two norms, which the paper leaves out."""
    saved = block_saved(share_of(spec or megatron_like(), run))
    statistics = 2 * 8 * S * B // (run.tp if run.sequence_parallel else 1)
    return sum(per_device(saved, run).values()) - statistics


def test_half_precision_eager_block_is_34sbh_plus_5as2b():
    run = lab.Training(micro_batch=B, seq_len=S, precision="bf16", attention="eager")
    assert kept(run) == S * B * H * 34 + 5 * A * S * S * B == korthikanti_block(S, B, H, A)


@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallel_divides_all_but_10sbh(t):
    run = lab.Training(micro_batch=B, seq_len=S, precision="bf16", attention="eager", tp=t)
    assert kept(run) == korthikanti_block(S, B, H, A, t)


@pytest.mark.parametrize("t", [2, 4])
def test_sequence_parallel_divides_the_rest_but_what_is_gathered(t):
    """Megatron-LM gathers the 2sbh of each pair's input again in backward; torch keeps both whole."""
    run = lab.Training(micro_batch=B, seq_len=S, precision="bf16", attention="eager", tp=t, sequence_parallel=True)
    gathered = 4 * S * B * H
    assert kept(run) == korthikanti_block(S, B, H, A, t, sequence_parallel=True) + gathered - gathered // t


def test_flash_attention_keeps_no_scores():
    eager = lab.Training(micro_batch=B, seq_len=S, precision="bf16", attention="eager")
    sdpa = lab.Training(micro_batch=B, seq_len=S, precision="bf16", attention="sdpa")
    scores = 5 * A * S * S * B
    log_sum_exp = 4 * A * S * B
    assert kept(eager) - kept(sdpa) == scores - log_sum_exp


def test_gelu_written_out_keeps_three_more_tensors_of_4h():
    """transformers' gelu_new is five operators; fused GELU is one."""
    run = lab.Training(micro_batch=B, seq_len=S, precision="bf16")
    more = kept(run, megatron_like(activation_function="gelu_new")) - kept(run)
    assert more == 3 * (2 * S * B * 4 * H)


def test_leading_dense_layers_are_in_the_mean_of_a_models_blocks():
    """DeepSeek-V3's first layers have no experts (first_k_dense_replace). A dense MLP of 18,432 channels keeps SiLU's
    input and output, the other branch and the product of both."""
    config = {**lab.model("deepseek-ai/DeepSeek-V3").config, "num_hidden_layers": 4}
    run = lab.Training(seq_len=512, precision="bf16")
    experts, mixed, dense = (
        per_device(block_saved(share_of(lab.model({**config, "first_k_dense_replace": count}), run)), run)["mlp"]
        for count in (0, 1, 4)
    )
    assert dense == 4 * 2 * 18432 * 512
    assert mixed == pytest.approx((3 * experts + dense) / 4, abs=1)


# ---- windows


SHAPE = {
    "model_type": "mistral", "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
PHI = {**SHAPE, "model_type": "phi3", "pad_token_id": 0, "num_key_value_heads": 8}
QWEN = {**SHAPE, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("window", "gpu"), [(1024, "A100-80GB"), (1024, "H100-80GB"), (1024, "cpu"), (1025, "H100-80GB")]
)
@pytest.mark.parametrize("shape", [SHAPE, PHI, QWEN], ids=["mistral", "phi3", "half of qwen2"])
def test_a_layer_with_a_window_keeps_a_mask_and_copies_of_grouped_heads(shape, window, gpu):
    """A window as long as the sequence hides nothing, and has its mask all the same (masking_utils.py,
    _ignore_causal_mask_sdpa); Phi-3's outputs are copied where a kernel lays them out as its queries."""
    run = lab.Training(micro_batch=4, seq_len=1024, precision="bf16", optimizer="sgd")
    model = {**shape, "sliding_window": window}
    estimate, simulation = lab.estimate(model, run, gpu), lab.simulate(model, run, gpu)
    assert estimate.phases["forward"] == pytest.approx(simulation.phases["forward"], rel=0.02)


@pytest.mark.parametrize("settings", [{}, {"compile": True, "checkpointing": "selective"}], ids=str)
def test_attention_pinned_to_the_memory_efficient_kernel_has_the_mask_too(settings):
    """transformers gives it by its own name of the attention, "sdpa", whichever kernel torch is told to take."""
    settings = {"micro_batch": 4, "seq_len": 1024, "precision": "bf16", "optimizer": "sgd", **settings}
    run = lab.Training(attention="efficient", **settings)
    model = {**SHAPE, "num_hidden_layers": 4, "sliding_window": 1024}
    estimate, simulation = lab.estimate(model, run, "H100-80GB"), lab.simulate(model, run, "H100-80GB")
    for phase in ("forward", "backward"):
        assert estimate.phases[phase] == pytest.approx(simulation.phases[phase], rel=0.02)


@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_eager_attention_copies_values_of_several_sequences(precision):
    """Phi-3 computes queries, keys and values in one matmul. The product with the values cannot merge batch and heads
    in a view of its output, so it copies them. Saving the whole output instead would be 3 % more."""
    wide = {**PHI, "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "sliding_window": None}
    run = lab.Training(micro_batch=8, seq_len=256, attention="eager", precision=precision)
    estimate, simulation = lab.estimate(wide, run, "A100-80GB"), lab.simulate(wide, run, "A100-80GB")
    assert estimate.phases["forward"] == pytest.approx(simulation.phases["forward"], rel=0.01)


def test_norms_of_queries_and_keys_keep_halves_whatever_attention_computes_in():
    """PyTorch's plain formula, which a T4 takes for grouped heads, makes fp32 of halves behind them."""
    run = lab.Training(micro_batch=4, seq_len=1024, precision="fp16")
    qwen = {**SHAPE, "model_type": "qwen3", "head_dim": 64, "sliding_window": None}
    plain, fused = (lab.estimate(qwen, run, gpu).detail["activations"] for gpu in ("T4", "A100-80GB"))
    assert plain["norms"] == fused["norms"] and "scores" in plain and "scores" not in fused


# ---- adapters


MODEL = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
WIDE = {**MODEL, "vocab_size": 512, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
QV = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("checkpointing", [None, "selective"])
@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize(
    "given", [{"precision": "bf16"}, {"precision": "mixed-bf16", "dp": 8, "zero": 3}], ids=["half", "FSDP2"]
)
def test_adapters_keep_their_inputs_and_results_in_the_dtype_that_computes_them(given, in_fp32, checkpointing, agree):
    lora = lab.LoRA(rank=8, targets=ALL, autocast_adapter_dtype=in_fp32)
    run = lab.Training(micro_batch=2, seq_len=2048, lora=lora, checkpointing=checkpointing, **given)
    agree(MODEL, run)


@pytest.mark.parametrize(
    "targets", [QV, ("o_proj",), ("gate_proj",), ("gate_proj", "up_proj"), ("down_proj",)], ids="+".join
)
@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_of_the_first_block_nothing_is_kept_before_its_first_adapter(targets, precision):
    """The input of the first block has no gradient. Three blocks therefore keep up to a third less."""
    run = lab.Training(micro_batch=2, seq_len=2048, precision=precision, lora=lab.LoRA(rank=8, targets=targets))
    estimate, simulation = lab.estimate(WIDE, run, "A100-80GB"), lab.simulate(WIDE, run, "A100-80GB")
    assert estimate.phases["backward"] == pytest.approx(simulation.phases["backward"], rel=0.02)


@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_dropout_gives_each_adapter_an_input_and_a_mask_of_its_own(precision):
    """In the first block dropout's input has no gradient: it keeps no mask."""
    lora = lab.LoRA(rank=8, targets=QV, dropout=0.1)
    run = lab.Training(micro_batch=2, seq_len=2048, precision=precision, lora=lora)
    estimate, simulation = lab.estimate(WIDE, run, "A100-80GB"), lab.simulate(WIDE, run, "A100-80GB")
    assert estimate.phases["backward"] == pytest.approx(simulation.phases["backward"], rel=0.02)


@pytest.mark.parametrize("checkpointing", ["full", "selective", None])
@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_down_projs_adapter_holds_its_input_cast_beside_what_dropout_returned(precision, checkpointing, agree):
    """With few words that is the peak, or that in the block that is recomputed."""
    lora = lab.LoRA(rank=8, targets=("down_proj",), dropout=0.1)
    run = lab.Training(2, 2048, precision, lora=lora, checkpointing=checkpointing)
    agree(WIDE, run)


@pytest.mark.parametrize("quantization", ["int8", None])
def test_gpt2s_gelu_is_written_out_in_fp32_under_autocast_forward_and_backward(quantization, agree):
    """transformers' NewGELUActivation: with few words its backward is the peak."""
    gpt2 = {"model_type": "gpt2", "n_embd": 512, "n_layer": 2, "n_head": 8, "vocab_size": 512, "n_positions": 2048}
    lora = lab.LoRA(rank=8, targets=("c_fc",))
    run = lab.Training(2, 2048, "autocast-bf16", lora=lora, quantization=quantization)
    agree(gpt2, run, "A100-80GB", 0.03)


def test_both_branches_in_one_cast_twice_as_much(agree):
    """Phi-3's gate_up_proj: the gradient of all that it returned is cast, scaled and cast back."""
    phi = {**WIDE, "model_type": "phi3", "pad_token_id": 0, "sliding_window": None}
    run = lab.Training(
        micro_batch=2, seq_len=2048, precision="bf16", lora=lab.LoRA(rank=8, targets=("gate_up_proj", "down_proj"))
    )
    agree(phi, run)


def test_when_attentions_backward_begins_nothing_of_the_mlp_is_left(agree):
    """A quantized model's scores are fp32 and written out: beside them are neither a norm nor what adapters read."""
    run = lab.Training(2, 2048, "bf16", checkpointing="full", lora=lab.LoRA(8, ALL), quantization="nf4")
    agree(WIDE, run)


def test_half_adapters_are_half_and_a_word_is_no_answer():
    wide, half = (
        lab.estimate(MODEL, lab.Training(precision="bf16", lora=lab.LoRA(autocast_adapter_dtype=each)), "A100-80GB")
        for each in (True, False)
    )
    assert half.parts["optimizer"] * 2 == wide.parts["optimizer"]
    with pytest.raises(lab.SpecError, match="autocast_adapter_dtype='no' is neither True nor False"):
        lab.LoRA(autocast_adapter_dtype="no")


@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_half_adapters_leave_all_beside_quantized_weights_half(checkpointing):
    """Nothing is cast to fp32 where nothing is prepared: estimate has what the real classes have, and a fifth less."""
    half = lab.LoRA(rank=8, autocast_adapter_dtype=False)
    run = lab.Training(16, 256, "fp16", attention="eager", quantization="nf4", lora=half, checkpointing=checkpointing)
    model = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
             "intermediate_size": 1408, "vocab_size": 2048, "num_hidden_layers": 3,
             "max_position_embeddings": 256}  # fmt: skip
    estimated, simulated = (verb(model, run, "A100-80GB").peak_allocated for verb in (lab.estimate, lab.simulate))
    assert estimated == pytest.approx(simulated, rel=0.02)
    prepared = lab.simulate(model, replace(run, lora=replace(half, autocast_adapter_dtype=True)), "A100-80GB")
    assert simulated < 0.9 * prepared.peak_allocated


def test_a_family_without_formulas_has_adapters_of_all_layers_and_sends_their_gradients():
    """Its layers' names are those of a plain transformer, and peft would know others."""
    spec, lora = lab.model("google/gemma-3-270m"), lab.LoRA(targets=("all-linear",))
    run = lab.Training(seq_len=256, cp=2, lora=lora)
    parameters = sum(16 * row.count * (row.inputs + row.outputs) for row in spec.block_linears)
    assert estimated(spec, run, "H100").parts["optimizer"] == 2 * 4 * parameters
    unknown = replace(run, lora=lab.LoRA(targets=("wi",)))
    assert estimated(spec, unknown, "H100").step_seconds > 0


# ---- quantized layers


bitsandbytes = pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 2, "intermediate_size": 1024, "vocab_size": 16000,
         "max_position_embeddings": 2048}  # fmt: skip
SEQUENCES, T = 2, 512


def run(quantization: str, checkpointing: str | None) -> lab.Training:
    adapters = lab.LoRA(rank=16, targets=("q_proj", "v_proj"))
    return lab.Training(SEQUENCES, T, "fp16", lora=adapters, quantization=quantization, checkpointing=checkpointing)


@pytest.mark.parametrize("checkpointing", ["full", "selective", None])
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_the_formula_is_the_simulation_within_two_percent(quantization, checkpointing):
    estimated, simulated = (
        verb(LLAMA, run(quantization, checkpointing), "T4").parts["activations"]
        for verb in (lab.estimate, lab.simulate)
    )
    assert estimated == pytest.approx(simulated, rel=0.02, abs=2**18)  # masks and the like


def test_checkpointing_does_not_free_the_inputs_of_int8_linears():
    """bitsandbytes/autograd/_functions.py, MatMul8bitLt: `ctx.tensors = (..., A)`, which is no saved tensor. In fp32:
    the input of q, k and v, attention's output, the MLP's input, down_proj's."""
    held = {each: lab.estimate(LLAMA, run(each, "full"), "T4").parts["activations"] for each in ("int8", "nf4")}
    layers, h, Q, i = 2, 256, 256, 1024
    assert held["int8"] - held["nf4"] == 4 * layers * SEQUENCES * T * (2 * h + Q + i)


@pytest.mark.parametrize(
    ("quantization", "checkpointing", "targets"),
    [
        ("int8", "full", ("q_proj", "v_proj")),
        ("int8", None, ("up_proj", "down_proj")),
        ("nf4", "full", ("up_proj", "down_proj")),
        ("nf4", None, ("q_proj", "v_proj")),
    ],
)
def test_the_micro_batch_before_keeps_int8_inputs_until_there_is_the_next_loss(quantization, checkpointing, targets):
    """And the last one until the step is over."""
    lora = lab.LoRA(rank=8, targets=targets)
    few = LLAMA | {"vocab_size": 2048}
    given = {"lora": lora, "quantization": quantization, "checkpointing": checkpointing}
    one, two = (lab.Training(8, T, "bf16", accumulation=count, **given) for count in (1, 2))
    more, update = [], []
    for verb in (lab.estimate, lab.simulate):
        alone, both = (verb(few, run, "A100-40GB").phases for run in (one, two))
        more.append(both["forward"] - alone["forward"])
        update.append(both["optimizer"])
    assert more[0] == pytest.approx(more[1], rel=0.02, abs=2**20)
    assert update[0] == pytest.approx(update[1], rel=0.02, abs=2**20)
    layers, h, Q, i = 2, 256, 256, 1024
    inputs = 8 * T * 4 * (layers * (2 * h + Q + i))
    if not checkpointing:  # the first layer's have no gradient up to its first adapter
        inputs -= 8 * T * 4 * (h if "q_proj" in targets else 2 * h + Q)
    leaf = 2 * 8 * T * 4 * h if checkpointing else 0
    gradients = lab.estimate(few, two, "A100-40GB").parts["gradients"]
    assert more[0] == (inputs if quantization == "int8" else 0) + leaf + gradients


@pytest.mark.parametrize("words", [32, 65536])  # the block is the peak, and the loss
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_weight_is_dequantized_for_its_product_in_half_and_is_gone_at_the_loss(family, words, agree):
    """Of Phi-3's gate_up_proj NF4 makes 32 MiB."""
    wide = LLAMA | {"hidden_size": 1024, "intermediate_size": 8192, "vocab_size": words, "model_type": family}
    wide |= {"pad_token_id": 0, "sliding_window": None, "num_hidden_layers": 3} if family == "phi3" else {}
    lora = lab.LoRA(rank=8, targets=("qkv_proj",) if family == "phi3" else ("q_proj", "v_proj"))
    run = lab.Training(1, T, "bf16", lora=lora, quantization="nf4", checkpointing="full")
    agree(wide, run, "A100-40GB")


@pytest.mark.parametrize("checkpointing", ["full", "selective", None])
@pytest.mark.parametrize("targets", [("q_proj",), ("up_proj",), ("down_proj",)], ids="+".join)
def test_int8_products_are_made_in_int32_and_their_graph_goes_with_what_is_recomputed(targets, checkpointing, agree):
    """With few words the block is the peak."""
    few = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 256}
    run = lab.Training(8, T, "bf16", lora=lab.LoRA(8, targets), quantization="int8", checkpointing=checkpointing)
    agree(few, run, "A100-40GB")


@pytest.mark.parametrize("checkpointing", ["full", None])
@pytest.mark.parametrize("quantization", ["nf4", None])
def test_autocast_copies_frozen_weights_for_as_long_as_autograd_keeps_them(quantization, checkpointing):
    """aten/src/ATen/autocast_mode.cpp, cached_cast, keeps copies of leaves that require gradients alone; a quantized
    linear dequantizes instead, and returns its input's fp32 (bitsandbytes, nn/modules.py, Linear4bit.forward)."""
    adapters = lab.LoRA(rank=8, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    wide = LLAMA | {"hidden_size": 512, "vocab_size": 4000}
    run = lab.Training(1, T, "autocast-bf16", lora=adapters, quantization=quantization, checkpointing=checkpointing)
    estimated, simulated = (verb(wide, run, "A100-40GB").peak_allocated for verb in (lab.estimate, lab.simulate))
    assert estimated == pytest.approx(simulated, rel=0.03)  # a copy of every weight would be a tenth
