"""One rank's share of a step: tokens, bytes and attention kernel, worked out once."""

import pytest

import llmlab as lab
from llmlab.formulas.memory.share import share_of

LLAMA = lab.model({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
                   "num_hidden_layers": 7, "intermediate_size": 176, "vocab_size": 1000,
                   "max_position_embeddings": 256})  # fmt: skip
LORA = lab.LoRA(4, ("q_proj",))


def test_context_parallelism_divides_tokens_and_a_pipeline_layers():
    run = lab.Training(micro_batch=3, seq_len=128, cp=4, pp=3, tp=2, sequence_parallel=True)
    stages = [share_of(LLAMA, run, stage=stage) for stage in range(3)]
    assert [share.layers for share in stages] == [2, 3, 2]
    assert [(share.first, share.last) for share in stages] == [(True, False), (False, False), (False, True)]
    assert {(share.tokens, share.sequence_ranks) for share in stages} == {(3 * 128 // 4, 2)}


@pytest.mark.parametrize(
    ("settings", "residual", "compute"),
    [
        ({"precision": "bf16"}, 2, 2),
        ({"precision": "autocast-bf16"}, 4, 2),
        ({"precision": "bf16", "quantization": "nf4", "lora": LORA}, 4, 4),  # peft leaves the rest in fp32
        ({"precision": "autocast-bf16", "quantization": "nf4", "lora": LORA}, 4, 2),
    ],
)
def test_around_quantized_linears_everything_is_fp32_but_under_autocast(settings, residual, compute):
    share = share_of(LLAMA, lab.Training(seq_len=64, **settings))
    assert (share.bytes.residual, share.bytes.compute) == (residual, compute)
    assert share.autocast == (residual != compute)


@pytest.mark.parametrize(
    ("settings", "card", "kernel", "attention_bytes"),
    [
        ({"precision": "bf16"}, "A100-80GB", "flash", 2),
        ({"precision": "bf16", "attention": "eager"}, "A100-80GB", "eager", 2),
        ({"precision": "fp32", "attention": "flash"}, None, "flash", 2),  # transformers casts to half
        ({"precision": "autocast-fp16"}, "T4", "math", 4),  # grouped heads, no mask
        ({"precision": "bf16", "attention": "efficient"}, "A100-80GB", "efficient", 2),
    ],
)
def test_the_kernel_says_in_which_bytes_attention_works_and_whether_it_writes_scores(
    settings, card, kernel, attention_bytes
):
    share = share_of(LLAMA, lab.Training(seq_len=64, **settings), card and lab.gpu(card))
    assert (share.kernel, share.attention_bytes) == (kernel, attention_bytes)
    assert share.writes_scores == (kernel in ("eager", "math")) == (not share.fused)


def test_the_cpus_dropout_masks_are_as_wide_as_what_they_mask():
    run = lab.Training(seq_len=64, precision="fp32")
    assert (share_of(LLAMA, run, cpu=True).mask_bytes, share_of(LLAMA, run).mask_bytes) == (4, 1)
