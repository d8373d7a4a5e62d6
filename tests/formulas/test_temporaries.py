"""What a block's operators take for a moment beside what it keeps, held to the real classes under simulation."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.temporaries import LossBytes, block_backward, loss_bytes

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 176, "vocab_size": 1000,
         "max_position_embeddings": 256}  # fmt: skip


def test_beside_the_scores_of_int8_linears_are_none_of_the_inputs_that_only_adapters_keep_later():
    """Scores are written out before o_proj and the MLP have read anything: of what the block keeps in the end, their
    inputs are not there yet. With few words that is forward's peak."""
    model = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8,
             "num_hidden_layers": 2, "intermediate_size": 1024, "vocab_size": 512,
             "max_position_embeddings": 2048}  # fmt: skip
    lora = lab.LoRA(8, ("o_proj", "up_proj", "down_proj"))
    run = lab.Training(1, 1024, "fp16", quantization="int8", lora=lora, attention="eager")
    estimate, simulation = (verb(model, run, "A100-80GB") for verb in (lab.estimate, lab.simulate))
    assert estimate.phases["forward"] == pytest.approx(simulation.phases["forward"], rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loss_of_logits_cut_by_vocabulary_holds_one_more_of_them(precision):
    """loss_parallel writes log_softmax out: what is shifted, its exponentials, and the difference, all in fp32."""
    sizes = {"vocab_size": 16000, "num_key_value_heads": 8, "max_position_embeddings": 512, "num_hidden_layers": 1}
    run = lab.Training(seq_len=512, precision=precision, tp=2)
    guess, found = (verb({**LLAMA, **sizes}, run, "H100-80GB") for verb in (lab.estimate, lab.simulate))
    assert guess.phases["forward"] == pytest.approx(found.phases["forward"], rel=0.06)
    assert guess.phases["backward"] == pytest.approx(found.phases["backward"], rel=0.06)


def test_the_bytes_of_gathered_logits():
    """In bf16: logits, their fp32 copy and log_softmax; its gradient and theirs; then the half gradient's own part.
    In fp32 the most of forward is the gather: a part, what all sent, and that in the order of words."""
    run = lab.Training(micro_batch=2, seq_len=256, precision="bf16", tp=4, loss_parallel=False)
    one = 2 * 256 * 1000  # numbers
    spec = lab.model({**LLAMA, "num_key_value_heads": 8})
    found = loss_bytes(share_of(spec, run))
    assert found == LossBytes(10 * one, 14 * one, 2 * one + 2 * one // 4, 2 * one, 6 * one)
    assert loss_bytes(share_of(spec, replace(run, precision="fp32"))).forward == 8 * one + 4 * one // 4
    fused = loss_bytes(share_of(spec, replace(run, kernels="fused-loss")))
    assert fused.forward == 4 * one + 2 * one // 4 and fused.gradient == 4 * one


def test_a_blocks_own_gradients_are_there_as_its_backward_ends_unless_they_are_added_or_leave():
    """FSDP2 has a shard of earlier ones, so a micro-batch's are whole and new."""

    def own(**fields):
        share = share_of(lab.model(LLAMA), lab.Training(**{"seq_len": 16, "precision": "bf16", **fields}))
        nothing = dict.fromkeys(("mlp", "scores"), 0)
        return block_backward(share, nothing, nothing).gradients

    once = own()
    assert 0 < once < 2 * 3 * 64 * 176 and own(precision="fp32") == pytest.approx(2 * once, rel=0.05)
    assert own(dp=2, zero=3, accumulation=2) == once
    for fields in ({"accumulation": 2}, {"lora": lab.LoRA()}, {"precision": "mixed-bf16", "offload": "optimizer"}):
        assert own(**fields) == 0


# ---- flash-attn's loss


GPT = {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 50000, "n_positions": 512,
       "activation_function": "gelu", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # fmt: skip
B, T, V = 2, 512, 50000


@pytest.mark.parametrize("settings", [
    {"precision": "bf16"}, {"precision": "autocast-bf16"}, {"precision": "mixed-bf16", "dp": 8, "zero": 3},
    {"precision": "mixed-bf16", "accumulation": 2, "checkpointing": "full"},
])  # fmt: skip
def test_the_formula_is_the_simulation_within_two_percent(settings, agree):
    run = lab.Training(B, T, kernels="fused-loss", **settings)
    agree(GPT, run, "A100-40GB")


def test_a_cap_keeps_its_tanh_and_has_a_gradient_of_its_own(agree):
    gemma = {"model_type": "gemma2", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "head_dim": 64, "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 50000,
             "max_position_embeddings": 512}  # fmt: skip
    run = lab.Training(B, T, "fp32", attention="eager", kernels="fused-loss")
    agree(gemma, run, "A100-40GB")


def test_it_saves_the_copies_that_the_usual_loss_makes():
    """Two bytes of each logit and two of its gradient, where transformers' loss has 2 + 4 + 4 + 4."""
    run = lab.Training(B, T, "bf16")
    usual, fused = (loss_bytes(share_of(lab.model(GPT), each)) for each in (run, replace(run, kernels="fused-loss")))
    assert (usual.gradient, fused.gradient) == (14 * B * T * V, 4 * B * T * V)
    assert (usual.after, fused.after) == (2 * B * T * V, 2 * B * T * V)


def test_a_script_of_ours_does_not_claim_it(tmp_path):
    run = lab.Training(seq_len=64, precision="mixed-bf16", kernels="fused-loss")
    with pytest.raises(lab.SpecError, match=r"kernels='fused-loss'.*kernels='liger'"):
        lab.write(GPT, run, "A100-40GB", tmp_path / "out")
    with pytest.raises(lab.NotAvailable, match="kernels='fused-loss' needs a CUDA GPU"):
        lab.measure(GPT, replace(run, precision="fp32"))
