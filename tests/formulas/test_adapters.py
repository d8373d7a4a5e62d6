"""What adapters keep of a step, held to what peft's own take under simulation."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.report import estimated

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
    """Its input has no gradient. Of three blocks that is up to a third of what they keep."""
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
