"""What a product in 16 bit takes besides its output on this CPU: tried once, and counted in a simulation."""

import pytest
import torch

import llmlab as lab
from llmlab.simulation.allocator.memory import HostMemory
from llmlab.simulation.engine.engine import HOST, Engine
from llmlab.simulation.workspaces import onednn

aten = torch.ops.aten


def taken(func, *operands):
    """The bytes that the simulated CPU allocates in `func` at most, besides what it returns."""
    engine = Engine(HOST, HostMemory())
    with engine:
        fakes = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) if isinstance(each, torch.Tensor) else each
            for each in operands
        ]
        before, at = engine.memory.allocated, len(engine.events)
        out = func(*fakes)
    now = most = before
    for event in engine.events[at:]:
        now += event.size
        most = max(most, now)
    return most - before - out.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [2, 16, 128])
def test_a_product_takes_what_it_takes_for_real(one_thread, dtype, rows):
    x, w, bias = torch.ones(rows, 128, dtype=dtype), torch.ones(128, 2000, dtype=dtype), torch.ones(2000, dtype=dtype)
    for func, operands in (
        (aten.mm.default, (x, w)),
        (aten.mm.default, (x, w.t().contiguous().t())),
        (aten.addmm.default, (bias, x, w)),
        (aten.bmm.default, (x.expand(3, -1, -1), w.expand(3, -1, -1))),
    ):
        func(*operands)
        with lab.meter("cpu") as meter:
            out = func(*operands)
        assert taken(func, *operands) == meter.peak_allocated - out.nbytes


@pytest.mark.parametrize("enabled", [True, False])
def test_patches_are_unfolded_where_there_is_no_kernel_of_onednn(one_thread, enabled):
    """slow_conv3d_forward copies each patch of a video into a column; oneDNN reads them where they are."""
    patches = torch.ones(64, 3, 2, 16, 16, dtype=torch.bfloat16)
    weight = torch.ones(32, 3, 2, 16, 16, dtype=torch.bfloat16)
    operands = patches, weight, None, [2, 16, 16], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 1
    with torch.backends.mkldnn.flags(enabled=enabled):
        aten.convolution.default(*operands)
        with lab.meter("cpu") as meter:
            out = aten.convolution.default(*operands)
        assert taken(aten.convolution.default, *operands) == meter.peak_allocated - out.nbytes
        if not enabled:
            assert meter.peak_allocated == patches.nbytes + out.nbytes


def test_large_products_are_not_tried(monkeypatch):
    monkeypatch.setattr(onednn, "LARGEST", 99)
    small, large = torch.ones(9, 11, dtype=torch.bfloat16), torch.ones(11, 10, dtype=torch.bfloat16)
    monkeypatch.setattr(onednn, "_measured_scratch", lambda *options: 640)
    assert taken(aten.mm.default, small, large) == 0
    assert taken(aten.mm.default, small, large[:, :9].contiguous()) == 640
