"""Traces without torch: evaluation, their range, and how they are kept."""

import json
from math import gcd

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import llmlab as lab
from llmlab.traces.kernels import Kernel, KernelFormula, KernelTrace
from llmlab.traces.points import points, range_of
from llmlab.traces.polynomials import Monomial, polynomial_through, value_of
from llmlab.traces.store import find, keep
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


@given(st.integers(1, 64), st.integers(1, 9000), st.integers(0, 2))
def test_the_points_of_a_trace_are_on_the_same_side_of_every_known_threshold(batch, tokens, fixed):
    found = points(batch, tokens, fixed)
    if found is None:
        return
    assert len({*found}) == len(found) >= (4, 3, 1)[fixed]
    assert {range_of(*point, fixed) for point in found} == {range_of(batch, tokens, fixed)}
    for sequences, length in found:
        assert (sequences > 1) == (batch > 1) and gcd(length, 64) == gcd(tokens, 64)
        assert 1 / 2 < sequences * length / (batch * tokens) < 2
        assert (sequences * length > 3072) == (batch * tokens > 3072)  # cuda/Embedding.cu


def test_a_trace_is_kept_for_its_range_and_made_anew_if_its_file_is_broken(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMLAB_CACHE", str(tmp_path))
    monkeypatch.setattr("llmlab.traces.store._kept", kept := {})
    spec, card = lab.model("gpt2"), lab.gpu("T4")
    run = lab.Training(micro_batch=2, seq_len=600, precision="fp16")
    assert find(spec, run, card) is None
    keep(spec, run, card, TRACE)
    kept.clear()  # as in another process
    assert find(spec, lab.Training(micro_batch=2, seq_len=1000, precision="fp16"), card) == TRACE
    same = {"micro_batch": 2, "seq_len": 1000, "precision": "fp16"}
    for other in ({"seq_len": 1200}, {"micro_batch": 1}, {"precision": "fp32"}, {"seq_len": 601}, {"micro_batch": 5}):
        assert find(spec, lab.Training(**{**same, **other}), card) is None
    kept.clear()
    (file,) = (tmp_path / "traces").iterdir()
    for broken in ("", "{}", "[]", '{"groups": 1, "fixed": false, "terms": [[0]], "moments": []}', "\x00"):
        file.write_text(broken)
        assert find(spec, run, card) is None


@example({(0, 2): 1, (1, 2): 1, (2, 2): 1})  # the first three points do not determine it
@given(st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.integers(1, 2**24), min_size=1, max_size=3))
def test_a_polynomial_is_found_again_from_its_values(factors):
    """Of at most three monomials, by four points; it may be another one through the same points."""
    at = (4, 1024), (4, 1536), (3, 2016), (5, 1024)
    polynomial = tuple(Monomial(factor, *powers) for powers, factor in factors.items())
    values = tuple(value_of(polynomial, *point) for point in at)
    found = polynomial_through(values, at)
    assert found is not None and [value_of(found, *point) for point in at] == list(values)
