"""Models with fewer layers, in whose place deeper ones are counted."""

from llmlab.simulation.depth import Depth


def test_a_model_that_is_a_layer_deeper_has_it_in_its_middle():
    depth = Depth(32, 0, 1, 4, ("model.layers",))
    paths = [depth.deeper(f"model.layers.{number}.mlp") for number in range(4)]
    assert paths == [f"model.layers.{number}.mlp" for number in (0, 1, 3, 4)]
    assert depth.deeper("model.norm") == "model.norm"
