"""Which variable keeps tensors, and how many of them and of their autograd nodes."""

import torch

from llmlab.scripts.holders import holders


def test_a_dictionary_of_lists_keeps_its_tensors_and_the_graphs_behind_them():
    weight = torch.ones(3, requires_grad=True)
    kept = {"losses": [2 * weight.sum()], "steps": 4}
    found = {holder.name: (holder.has_graph, count) for holder, count in holders(lambda tensor: True).items()}
    assert found["weight"] == (False, 1)
    assert found["kept"] == (True, len(kept["losses"]) + 3)  # a product, a sum, and the weight's gradient
