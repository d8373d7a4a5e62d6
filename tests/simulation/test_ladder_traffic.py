"""What each rung moves is what its file says: counted in the simulator, by Inductor, and in Triton's interpreter."""

import os
import shutil
import sys
from functools import cache

import pytest
import torch

import llmlab.course.kernels as kernels
from llmlab.base.errors import NotAvailable
from llmlab.course.kernels import rungs
from llmlab.simulation import ladder_traffic as ladder
from llmlab.simulation.simulator import simulator

if torch.cuda.is_available():
    pytest.skip("with a GPU Triton compiles, and compiled kernels cannot be watched", allow_module_level=True)

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
TRITON = pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")
# Bytes per value of the input, forward and backward, as the docstrings of kernels/ladder derive them, for b = 2.
BYTES = {
    "softmax": {0: (8 * 4 + 2 * (2 + 4), None), 1: (2 * 2, None), 3: (2 * 2, None), 4: (2 * 2, 3 * 2)},
    "rms_norm": {0: (7 * 4 + 2 * (2 + 4), None), 1: (2 * 2, 3 * 2), 3: (2 * 2, None), 4: (2 * 2, 3 * 2 + 8 / 32)},
    "swiglu": {0: (8 * 2, None), 1: (5 * 2, None), 3: (3 * 2, None), 4: (3 * 2, 5 * 2)},
    "rope": {0: (10 * 2, None), 1: (9 * 2, None), 3: (2 * 2, None), 4: (2 * 2, 2 * 2)},
    "cross_entropy": {0: (2 + 4 + 4 + 8 + 8 + 4 + 8, None), 1: (2 + 4 + 4 + 4, None), 3: (2, None), 4: (2, 2 * 2)},
}
# What the docstrings leave out: RMSNorm's weight and its gradient, 12 bytes a column, and 4 bytes per row; cos and sin,
# as much as 2 of the 40 heads, which q's operators and k's read one after the other.
LEFT_OUT = {"rms_norm": 12 / 2 / ladder.ROWS + 0.01, "rope": 2 * 2 / 40 + 1e-9}


@cache
def counted_ladder(kernel):
    return ladder.count_ladder(kernel, "A100-80GB")


@TRITON
@pytest.mark.parametrize("kernel", BYTES)
def test_a_rung_moves_what_its_file_says(kernel):
    for counted in counted_ladder(kernel):
        if counted.rung == 2:
            continue
        for said, found in zip(BYTES[kernel][counted.rung], (counted.forward, counted.backward), strict=True):
            if said is None:
                continue
            more = found.bytes / counted.unit - said / 2  # in readings of the input
            assert -1e-9 <= more <= LEFT_OUT.get(kernel, 0.1), (counted.rung, said, found)


@TRITON
@pytest.mark.parametrize("kernel", BYTES)
def test_the_fused_rung_is_one_launch_forward_and_moves_least(kernel):
    """But for the loss, which sums its rows; and Triton forward alone loses backward what it gained (rung 3)."""
    naive, better, forward_only, fused = (one for one in counted_ladder(kernel) if one.rung != 2)
    assert fused.forward.launches == (5 if kernel == "cross_entropy" else 1) <= naive.forward.launches
    assert fused.forward.bytes <= 1.02 * better.forward.bytes < naive.forward.bytes
    assert sum(fused.times) < sum(naive.times) and forward_only.backward.bytes > 4 * fused.backward.bytes


@pytest.mark.skipif(COMPILER is None, reason="Inductor needs a C++ compiler on a CPU")
def test_inductor_makes_one_pass_of_what_it_can_fuse_into_one_loop():
    """Forward like the fused kernels; RMSNorm's backward needs a second one, for the sums over rows."""
    softmax, swiglu, norm = (
        next(one for one in counted_ladder(kernel) if one.rung == 2) for kernel in ("softmax", "swiglu", "rms_norm")
    )
    assert [one.forward.launches for one in (softmax, swiglu, norm)] == [1, 1, 1]
    assert swiglu.times == (3, 5)
    assert softmax.times == (pytest.approx(2, abs=0.02), pytest.approx(3, abs=0.02))  # and a number a row
    assert norm.times[0] == pytest.approx(2, abs=0.05) and norm.backward.launches == 2


@pytest.mark.skipif(COMPILER is None, reason="Inductor needs a C++ compiler on a CPU")
@pytest.mark.parametrize("threads", [1, 2])
def test_the_bytes_of_a_gpus_kernels_do_not_depend_on_this_machines_threads(threads):
    """Backward, the compiled cross entropy reads the logits, and writes and reads the target's gradient in fp32 inside
    of kernels that add atomically: no operator of PyTorch scatters between them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        counted = ladder._count_compiled("cross_entropy", torch.bfloat16)
    finally:
        torch.set_num_threads(before)
    assert counted.times[1] == pytest.approx(6, abs=0.05)


@TRITON
def test_a_wide_row_is_asked_for_twice_and_written_once():
    x = torch.randn(2, 70000)
    counted = ladder.count_moved(lambda: kernels.softmax(x, rung=4))
    assert counted.launches == 1 and counted.asked == 3 * x.nbytes and counted.bytes == 2 * x.nbytes


@TRITON
def test_pytorchs_operators_around_a_kernel_are_counted_too_and_the_interpreters_copies_are_not():
    x = torch.randn(4, 64)
    alone = ladder.count_moved(lambda: kernels.softmax(x, rung=4))
    both = ladder.count_moved(lambda: kernels.softmax(x + 1, rung=4))
    assert alone == (1, 2 * x.nbytes, 2 * x.nbytes)
    assert (both.launches, both.bytes) == (2, 4 * x.nbytes)


def loss_step(device, rung, tokens, hidden, vocab):
    states, weight = (
        torch.randn(n, hidden, dtype=torch.bfloat16, device=device, requires_grad=True) for n in (tokens, vocab)
    )
    targets = torch.zeros(tokens, dtype=torch.int64, device=device)
    return lambda: kernels.linear_cross_entropy(states, weight, targets, rung=rung).backward()


def simulated_loss(rung, *sizes):
    """Return the bytes of the products, the bytes of the rest, and the FLOP."""
    with simulator("A100-80GB") as sim:
        step = loss_step("cuda", rung, *sizes)
        with sim.operators() as operators:
            step()
    products = sum(kernel.bytes for kernel in operators if kernel.kind == "matmul")
    return products, ladder.moved(operators).bytes - products, operators.flops


@TRITON
def test_the_fused_loss_reads_the_weight_for_every_chunk_and_does_the_same_products():
    tokens, hidden, vocab = 1024, 256, 4096
    whole, rest_of_whole, flops = simulated_loss(0, tokens, hidden, vocab)
    chunks, _, flops_of_chunks = simulated_loss(1, tokens, hidden, vocab)
    assert flops == flops_of_chunks == 3 * 2 * tokens * hidden * vocab
    logits, weight, states = 2 * tokens * vocab, 2 * vocab * hidden, 2 * tokens * hidden
    # Three products: each reads two of logits, weight and hidden, and writes the third.
    assert whole == 3 * (logits + weight + states)
    many = tokens // max(128, tokens * hidden // vocab)
    # dweight is read once more, as each chunk is added to it.
    assert chunks == 3 * (logits + states) + many * (1 + 1 + 2) * weight
    with ladder.interpreted() as launches:
        loss_step("cpu", 4, 32, 64, vocab)()
    fused = sum(launch.moved().bytes for launch in launches) / (2 * 32 * vocab)
    # The gradient overwrites the logits: one pass for the loss, one back and forth for its gradient.
    assert 3 < fused < 3.1 < rest_of_whole / logits / 10


def test_where_triton_compiles_nothing_can_be_watched(monkeypatch):
    monkeypatch.setattr(rungs, "INTERPRETED", False)
    with pytest.raises(NotAvailable, match="set TRITON_INTERPRET=1 before Python"):
        ladder.count_moved(lambda: None)
