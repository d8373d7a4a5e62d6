"""Which variable keeps tensors, and how many of them and of their autograd nodes."""

import torch

from llmlab.scripts.holders import holders


def test_a_dictionary_of_lists_keeps_its_tensors_and_the_graphs_behind_them():
    weight = torch.ones(3, requires_grad=True)
    kept = {"losses": [2 * weight.sum()], "steps": 4}
    found = {holder.name: (holder.has_graph, count) for holder, count in holders(lambda tensor: True).items()}
    assert found["weight"] == (False, 1)
    assert found["kept"] == (True, len(kept["losses"]) + 3)  # a product, a sum, and the weight's gradient


class Rows(list):
    """A data set, which computes its rows as they are read."""

    def __iter__(self):
        raise AssertionError


class Log:
    def __init__(self):
        self.seen = []


def test_attributes_count_by_their_names_and_a_data_set_is_not_read():
    log, rows, pair = Log(), Rows([torch.ones(1)]), (torch.ones(1), [torch.ones(1)])
    log.seen.append(torch.ones(1))
    found = {holder.name: (holder, count) for holder, count in holders(lambda tensor: True).items()}
    assert found["seen"][1] == 1 and found["pair"][1] == 1 + len(pair[1]) and "rows" not in found and rows.__class__
    assert str(found["seen"][0]).startswith("test_holders.py, line ") and "seen.append(" in str(found["seen"][0])
    assert not holders(lambda tensor: False)
