"""The drawings on tensor parallelism show the numbers that they are given."""

from llmlab.course.figures.tensor_parallel import (
    PARTS,
    draw_activations,
    draw_pair,
    draw_sequence_parallel,
    draw_steps,
)

GIB = 2**30


def test_a_pair_names_the_shares():
    alt = draw_pair(8, 3584).alt
    assert "3,584 of the f columns" in alt and "8 heads on each rank" in alt


def test_sequence_parallelism_leaves_a_share_of_the_stream():
    alt = draw_sequence_parallel(2**26, 8).alt
    assert "64 MiB" in alt and "the norms have 8 MiB" in alt


def test_activations_are_sums_of_their_kinds():
    alt = draw_activations({"tensor": {"norms": 30 * GIB, "inputs of pairs": 10 * GIB, "inside pairs": 5 * GIB}}).alt
    assert "tensor: 45.0 GiB (norms 30.0" in alt


def test_a_step_is_the_sum_of_its_parts():
    alt = draw_steps({"tp = 8": dict(zip(PARTS, (7.9, 2.1, 0.5, 0.0, 0.1), strict=True))}).alt
    assert "tp = 8: 7.90 + 2.10 + 0.50 + 0.00 + 0.10 = 10.6 s" in alt
