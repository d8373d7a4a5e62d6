"""What a gated MLP takes for a moment beside what it keeps."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.memory.mlp import in_backward, in_forward, mlp_of
from llmlab.formulas.memory.share import share_of

TOKENS, HIDDEN, WIDTH = 2 * 2048, 2048, 512
LLAMA = {"model_type": "llama", "vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": WIDTH,
         "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
         "max_position_embeddings": 2048}  # fmt: skip


def test_an_adapter_in_fp32_has_a_copy_of_its_input_and_results_of_twice_the_width():
    """peft casts what a half layer reads (tuners/lora/layer.py, _cast_input_dtype): 4 bytes for each channel, of which
    nothing is kept where the block is recomputed. The adapter's result, and that scaled, are in its dtype too."""

    def highest(in_fp32: bool) -> int:
        lora = lab.LoRA(8, ("up_proj",), autocast_adapter_dtype=in_fp32)
        run = lab.Training(2, 2048, "bf16", checkpointing="full", lora=lora)
        return in_forward(mlp_of(share_of(lab.model(LLAMA), run)), "full")

    assert highest(True) - highest(False) == TOKENS * (4 * HIDDEN + 2 * (4 - 2) * WIDTH)


WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 8192}
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("checkpointing", [None, "selective", "full"])
@pytest.mark.parametrize("settings", [
    {"lora": lab.LoRA(8, MLP, dropout=0.1)}, {"lora": lab.LoRA(8, MLP), "quantization": "nf4"},
    {"lora": lab.LoRA(8, MLP), "quantization": "int8"},
    {"lora": lab.LoRA(8, ("gate_proj",)), "quantization": "nf4", "precision": "autocast-bf16"},
], ids=str)  # fmt: skip
def test_a_wide_mlp_takes_what_is_simulated(settings, checkpointing, agree):
    """Nothing else is as large in such a model."""
    agree(WIDE, lab.Training(**{"micro_batch": 2, "seq_len": 1024, "precision": "bf16", "optimizer": "sgd",
                                "checkpointing": checkpointing, **settings}))  # fmt: skip


def test_the_gradients_of_the_branches_and_of_their_product_are_there_together():
    run = lab.Training(2, 2048, "bf16")
    for tp in (1, 2):
        mlp = mlp_of(share_of(lab.model(LLAMA), replace(run, tp=tp)))
        assert in_backward(mlp, 0) == 3 * 2 * TOKENS * WIDTH // tp
    assert mlp_of(share_of(lab.model("gpt2"), run)) is None
    assert mlp_of(share_of(lab.model("Mixtral-8x7B"), run)) is None
