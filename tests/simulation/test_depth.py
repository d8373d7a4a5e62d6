"""Which layers of a model repeat, and models with fewer layers, in whose place deeper ones are counted."""

import llmlab as lab
from llmlab.simulation.depth import Depth, depth_of, with_layers

SIZES = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
         "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0}  # fmt: skip
GEMMA = {"model_type": "gemma3_text", **SIZES, "num_hidden_layers": 24, "sliding_window": 512}


def test_a_model_that_is_a_layer_deeper_has_it_in_its_middle():
    depth = Depth(32, 0, 1, 4, ("model.layers",))
    paths = [depth.deeper(f"model.layers.{number}.mlp") for number in range(4)]
    assert paths == [f"model.layers.{number}.mlp" for number in (0, 1, 3, 4)]
    assert depth.deeper("model.norm") == "model.norm"


def test_layers_that_differ_repeat_in_groups():
    """Gemma 3 has one layer of full attention after five with a window (arXiv 2503.19786, section 2)."""
    depth = depth_of(lab.model(GEMMA))
    assert (depth.first, depth.period, depth.least, depth.groups) == (0, 6, 12, 2)
    assert depth.deeper("model.layers.5.mlp") == "model.layers.5.mlp"
    assert depth.deeper("model.layers.6.mlp") == "model.layers.12.mlp"
    assert depth_of(lab.model({"model_type": "olmo2", **SIZES, "num_hidden_layers": 5})).period == 1


def test_an_encoder_and_a_decoder_are_as_deep_as_each_other():
    t5 = lab.model("google-t5/t5-base")
    both = depth_of(t5)
    assert len(both.stacks) == 2 and both.layers == 12
    assert with_layers(t5, 3).layers == 6  # three of each


def test_layers_that_get_the_towers_features_do_not_repeat():
    """deepstack_visual_indexes of Qwen3-VL: the first three layers add those of three layers of the tower."""
    depth = depth_of(lab.model("Qwen/Qwen3-VL-8B-Instruct"))
    assert (depth.first, depth.period) == (3, 1)
