"""What a pass of a model that generates takes beside weights and cache."""

import llmlab as lab
from llmlab.formulas.inference import working_bytes

WIDE = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 16384, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
        "max_position_embeddings": 512}  # fmt: skip


def test_eager_attentions_weights_and_its_mask_are_alive_while_the_mlp_runs():
    """The block's forward has them in variables (modeling_llama.py); the mask is one for all heads. The MLP is so wide
    that it is the peak."""
    eager, fused = (
        working_bytes(lab.model(WIDE), lab.Inference(2, 256, 1, attention=attention), kernel, 256, 256)
        for attention, kernel in (("eager", "eager"), ("sdpa", "flash"))
    )
    assert eager - fused == 2 * 2 * 256**2 * (4 + 1)
