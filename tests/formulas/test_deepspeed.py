"""DeepSpeed's messages, and the CPU time of its updates."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.time.stacks.deepspeed import messages, update

RUN = lab.Training(dp=8, zero=3, precision="mixed-bf16", stack="deepspeed")
BLOCK = 218_112_000  # elements of a block of Llama 3.1 8B, in 7 matrices


def test_zero_3_gathers_by_prefetch_buckets_and_scatters_by_reduce_buckets():
    """stage3_prefetch_bucket_size is 50 million elements, reduce_bucket_size 500 million."""
    assert messages(RUN, BLOCK, 7) == (5, 1, 0.0)
    assert messages(RUN, 3 * BLOCK, 7)[:2] == (7, 2)  # no more than matrices
    small = replace(RUN, stack="deepspeed:reduce_bucket_size=10000000")
    assert messages(small, BLOCK, 7)[1] == 14  # each matrix, and the vectors before it, alone


def test_what_is_used_again_within_the_reuse_distance_is_not_gathered_again():
    """stage3_max_reuse_distance is a billion elements; twice the block lies between two uses."""
    recomputed = replace(RUN, checkpointing="full")
    assert messages(recomputed, BLOCK, 7)[2] == 0
    assert messages(recomputed, 4 * BLOCK, 7)[2] == pytest.approx(1 - 10**9 / (8 * BLOCK))
    assert messages(RUN, 4 * BLOCK, 7)[2] == 0


def test_an_update_takes_operators_for_each_parameter_and_more_without_zero():
    spec = lab.model("gpt2")
    of = {zero: [update(spec, replace(RUN, zero=zero), n) for n in (0, 100, 200)] for zero in range(4)}
    for none, some, twice in of.values():
        assert twice - some == pytest.approx(some - none) and some - none > 100 and none > 0
    assert of[0][2] > of[3][2]
