"""GPUs to plan for: how they are written, and which numbers of them the cheapest plan tries."""

import pytest

import llmlab as lab
from llmlab.planning.machines import joined, machines, of_total, priced


@pytest.mark.parametrize(("text", "counts"), [("T4", (1, 1)), ("8xT4", (1, 8)), ("2x4xT4", (2, 4)), ("16xT4", (2, 8))])
def test_machines_are_read_and_written(text, counts):
    nodes = machines(text)
    assert (nodes.nodes, nodes.per_node) == counts and nodes.gpu.name == "T4"
    assert nodes.total == nodes.nodes * nodes.per_node
    again = machines(str(nodes))
    assert (again.nodes, again.per_node, again.gpu) == (nodes.nodes, nodes.per_node, nodes.gpu)


@pytest.mark.parametrize(("text", "name"), [("2x4090", "2xRTX-4090"), ("2 X 24gb", "2x24GB"), ("4090", "1xRTX-4090")])
def test_a_gpu_s_name_may_begin_with_a_digit(text, name):
    assert str(machines(text)) == name


@pytest.mark.parametrize("total", [1, 2, 8, 16, 64])
def test_a_number_of_gpus_fills_nodes_of_eight(total):
    nodes = of_total(lab.gpu("H100-80GB"), total)
    assert nodes.total == total and nodes.per_node == min(total, 8)


def test_one_gpu_needs_no_link_and_several_do():
    without = next(gpu for gpu in lab.gpus() if not joined(of_total(gpu, 2)))
    assert joined(of_total(without, 1)) and joined(machines("2x8xH100-80GB"))


@pytest.mark.parametrize("text", ["T4", "4xT4", "8xT4", "2x8xT4", "3x8xT4", "6xT4"])
def test_the_cheapest_tries_up_to_as_many_gpus_of_every_kind_with_a_price(text):
    most = machines(text)
    candidates = list(priced(most))
    assert all(candidate.usd_per_hour and joined(candidate) for candidate in candidates)
    totals = [candidate.total for candidate in candidates if candidate.gpu.name == "H100-80GB"]
    assert totals == sorted(set(totals)) and totals[0] == 1 and totals[-1] == most.total
    assert all(total.bit_count() == 1 or total % most.per_node == 0 for total in totals)
    alone = lab.gpu("H100-80GB").usd_per_hour
    assert [c.usd_per_hour for c in candidates if c.gpu.name == "H100-80GB"] == [alone * total for total in totals]
