"""The tiled product is torch's, and asks for as many bytes as its formula says."""

import pytest
import torch

from llmlab.base.errors import NotAvailable, SpecError
from llmlab.course.kernels import rungs
from llmlab.course.kernels.ladder.matmul import matmul
from llmlab.simulation.ladder_traffic import interpreted

needs_triton = pytest.mark.skipif(rungs.triton is None, reason="no Triton")


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 16, 16), (37, 70, 45), (1, 3, 2)], ids=str)
def test_it_is_torchs_product(shape, dtype):
    m, k, n = shape
    a, b = torch.randn(k, m).to(dtype).T, torch.randn(k, n).to(dtype)  # a's rows do not follow one another
    torch.testing.assert_close(matmul(a, b), (a.double() @ b.double()).to(dtype))


@needs_triton
def test_twice_the_tile_is_half_the_loads():
    a, b = torch.randn(64, 128), torch.randn(128, 192)
    for tile in (16, 32, 64):
        with interpreted() as launches:
            matmul(a, b, tile)
        (launch,) = launches
        assert launch.moved().asked == 4 * (64 * 128 * 192 // tile * 2 + 64 * 192)


def test_what_it_does_not_take_is_refused(monkeypatch):
    with pytest.raises(SpecError, match=r"\(2, 3\) torch.float32 and \(3, 4\) torch.float16; allowed are"):
        matmul(torch.ones(2, 3), torch.ones(3, 4).half())
    monkeypatch.setattr(rungs, "triton", None)
    with pytest.raises(NotAvailable, match=r"torch\.matmul runs here"):
        matmul(torch.ones(2, 3), torch.ones(3, 4))
