"""Operators as CUDA's kernels allocate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llmlab as lab
from llmlab.simulation.allocator.caching import Allocator
from llmlab.simulation.devices import GPU_DEVICE
from llmlab.simulation.engine.engine import Engine
from llmlab.simulation.patching.patches import tensors_on_gpu
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture
def card(monkeypatch):
    """A GPU on which no block keeps the rest of its segment."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with simulator("A100-40GB") as sim:
        warm = torch.zeros(64, 64, device="cuda", requires_grad=True)
        (warm @ warm).sum().backward()  # both workspaces are there
        yield sim


def made(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=grad)


def peak(run: Callable[[], Any]) -> int:
    """Bytes that `run` had at most above where it began; what it returns is alive until then."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    del result
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_bias_is_added_in_place_where_the_input_is_not_contiguous(card, contiguous):
    """native/Linear.cpp: addmm, or matmul, whose input is copied, and add_."""
    layer = nn.Linear(256, 512).cuda()
    layer(made(4, 256))
    x = made(64, 32, 256) if contiguous else made(32, 64, 256).transpose(0, 1)
    out, copied = 64 * 32 * 512 * 4, 64 * 32 * 256 * 4
    assert peak(lambda: layer(x)) == (out if contiguous else out + copied)


def test_the_cpu_composes_safe_softmax_of_the_same_parts():
    """The same code as on a GPU, measured: a byte per element and a row beside the output, and numbers."""
    x = torch.randn(64, 4096)
    n = x.numel()
    torch.ops.aten._safe_softmax(x, -1)
    with lab.meter("cpu") as meter:
        torch.ops.aten._safe_softmax(x, -1)
    assert 5 * n + 64 <= meter.peak_allocated <= 5 * n + 64 + 64


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_says_that_on_the_card_it_is_a_kernel_of_cudnn(card, layer):
    layer(16, 32, 2).cuda()(made(4, 2, 16))[0].sum().backward()
    (note,) = card.notes
    assert note.code == "library-workspace" and "cuDNN" in note and f"torch.{layer.__name__.lower()}" in note


def test_rms_norm_of_two_dtypes_is_not_fused(card):
    """native/layer_norm.cpp, rms_norm_symint: only where weight and input have one dtype."""
    x, weight = made(64, 256, dtype=torch.bfloat16, grad=True), made(256, grad=True)
    before = torch.cuda.memory_allocated()
    _out = F.rms_norm(x, (256,), weight)
    assert torch.cuda.memory_allocated() - before > 4 * 64 * 256 + 512


def test_rms_norm_of_one_dtype_is_a_kernel_forward_and_another_backward(card):
    """It keeps the reciprocal of each row's root mean square in fp32."""
    x, weight = made(64, 256, dtype=torch.bfloat16, grad=True), made(256, dtype=torch.bfloat16, grad=True)
    before = torch.cuda.memory_allocated()
    out = F.rms_norm(x, (256,), weight)
    assert torch.cuda.memory_allocated() - before == 2 * 64 * 256 + 512 and "FusedRMSNorm" in out.grad_fn.name()
    of_x, of_weight = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    assert (of_x.shape, of_weight.shape) == (x.shape, weight.shape)


@pytest.mark.parametrize("function", [F.silu, F.mish])
def test_a_backward_that_is_also_written_in_other_operators_is_the_one_kernel_that_the_card_has(card, function):
    x, grad = made(1024, 256, grad=True), made(1024, 256)
    y = function(x)
    assert peak(lambda: torch.autograd.grad(y, x, grad)) == 4 * x.numel()


def test_a_step_of_our_own_makes_tensors_of_data_on_the_gpu():
    """For "cpu:0", the device of the simulated GPU, torch itself would make them on the host."""
    engine = Engine(GPU_DEVICE, Allocator(), workspaces={})
    with engine, tensors_on_gpu():
        made, given = torch.tensor([1.0, 2.0], device=GPU_DEVICE), torch.tensor(3.0)
        assert made.device == GPU_DEVICE and given.device.type == "cpu" and engine.memory.allocated == 512
        assert torch.tensor([given, 4.0]).tolist() == [3.0, 4.0]
