"""Traces without torch: evaluation, their range, and how they are kept."""

import json

import pytest

from llmlab.traces.kernels import Kernel, KernelFormula, KernelTrace
from llmlab.traces.polynomials import Monomial
from llmlab.traces.trace import Moment, Term, Trace, block_of

MiB = 2**20
WEIGHT = Term((Monomial(3 * MiB, 0, 0),), "weights", "model.layers.*.mlp", "empty")
SCORES = Term((Monomial(32.0, 1, 2),), "activations", "model.layers.*.self_attn", "bmm")
TRACE = Trace(
    groups=2, fixed=0, terms=(WEIGHT, SCORES),
    moments=(Moment("forward", "bmm in model.layers.1.self_attn", {0: (2, 1), 1: (1, 0)}),),
    kernels=KernelTrace((KernelFormula(Kernel("aten::bmm", "matmul", "bf16", 0, 0, (), 1, False, "forward"),
                                       ((Monomial(64.0, 1, 2),),) * 5),), (0,), (0, 0)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("requested", "given_"),
    [
        (1, 512),
        (3 * MiB + 1, 3 * MiB + 512),  # split off a segment of 20 MiB
        (21 * MiB + 1, 22 * MiB),  # of a segment of 22 MiB, whose rest of less than 1 MiB is not split off
        (20 * MiB + 1, 20 * MiB + 512),  # its rest is
    ],
)
def test_a_request_takes_what_a_new_segment_of_the_caching_allocator_gives(requested, given_):
    """c10/cuda/CUDACachingAllocator.cpp: get_allocation_size, should_split; the simulated allocator does the same."""
    from llmlab.simulation.allocator.caching import Allocator

    allocator = Allocator(2**40)
    allocator.malloc(requested)
    assert block_of(requested) == given_ == allocator.allocated


def test_a_moment_has_its_tensors_of_each_group_of_layers():
    (total,) = TRACE.totals(batch=3, tokens=100)
    assert total == 4 * 3 * MiB + block_of(3 * 32 * 100**2)
    (moment,) = TRACE.moments
    assert TRACE.parts(moment, 3, 100) == {"weights": 12 * MiB, "activations": block_of(960_000)}


def test_json_holds_all_of_it():
    assert Trace.from_dict(json.loads(json.dumps(TRACE.to_dict()))) == TRACE
