import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from llmlab.measurement import meters


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=40))
def test_allocated_peak_and_timeline_are_exact_to_the_byte(steps):
    held, expected = [], [0]
    with lab.meter("cpu") as m:
        for keep, elements in steps:
            if keep or not held:
                held.append(torch.empty(elements, dtype=torch.uint8))
                expected.append(expected[-1] + elements)
            else:
                expected.append(expected[-1] - held.pop(elements % len(held)).nbytes)
    assert m.timeline == tuple(expected[1:])
    assert m.allocated == expected[-1]
    assert m.peak_allocated == max(expected)


def test_figures_can_be_read_inside_the_block_and_the_peak_reset():
    with lab.meter("cpu") as m:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.uint8)
        assert (m.allocated, m.peak_allocated) == (1500, 1500)
        del a
        assert (m.allocated, m.peak_allocated) == (500, 1500)
        m.reset_peak()
        assert m.peak_allocated == 500
        del b
    assert (m.allocated, m.peak_allocated) == (0, 500)
    torch.empty(10**6)
    assert m.peak_allocated == 500


def test_a_cpu_reserves_nothing():
    with lab.meter("cpu") as m:
        torch.empty(10)
    assert m.reserved is None and m.peak_reserved is None


def test_gradients_are_as_big_as_their_parameters():
    layer = torch.nn.Linear(300, 200)
    x = torch.ones(7, 300)
    with lab.meter("cpu") as m:
        layer(x).sum().backward()
    assert m.allocated == sum(p.nbytes for p in layer.parameters())


def test_a_meter_in_a_meter_is_refused_and_leaves_the_outer_one_counting():
    with lab.meter("cpu") as m:
        with pytest.raises(lab.NotAvailable, match="only one recording"), lab.meter("cpu"):
            pass
        tensor = torch.empty(64, dtype=torch.uint8)
    assert m.allocated == tensor.nbytes


def test_an_error_inside_ends_the_recording():
    with pytest.raises(ZeroDivisionError), lab.meter("cpu") as m:
        kept = torch.empty(64, dtype=torch.uint8)
        raise ZeroDivisionError
    assert m.peak_allocated == kept.nbytes
    assert not torch._C._autograd._profiler_enabled()
    with lab.meter("cpu") as after:
        pass
    assert after.timeline == ()


def test_the_example_in_its_documentation():
    assert doctest.testmod(meters).failed == 0
