"""What a block keeps, held to the paper's formula."""

import pytest

import llmlab as lab
from llmlab.formulas.memory.activations import block_saved, korthikanti_block, per_device
from llmlab.formulas.memory.share import share_of

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
