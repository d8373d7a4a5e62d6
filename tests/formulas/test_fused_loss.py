"""kernels="fused-loss": logits stay in half precision, and backward writes one gradient beside them."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.temporaries import loss_bytes

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
