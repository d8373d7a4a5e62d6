"""torchtitan's block and step."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.time.stacks.torchtitan import block

LLAMA = lab.model("meta-llama/Meta-Llama-3-8B")  # h 4096, f 14336, Q 4096, K 1024, H 32
TOKENS = 8192


@pytest.mark.parametrize(
    "given, simulated",  # GiB, lab.simulate with torchtitan 0.2.2 and torch 2.13
    [
        ({"dp": 64}, 29.85),
        ({"dp": 64, "stack": "torchtitan:keeps_attention=False"}, 27.81),
        ({"dp": 8, "checkpointing": "full"}, 26.13),
        ({"dp": 8, "seq_len": 4096, "stack": "torchtitan:ac=none"}, 38.71),
        ({"dp": 8, "seq_len": 1024, "stack": "torchtitan:optimizer=foreach"}, 18.76),
    ],
)
def test_peaks_of_its_own_code(given, simulated):
    run = lab.Training(**{"seq_len": TOKENS, "stack": "torchtitan", **given})
    estimate = lab.estimate(LLAMA, run, "H100-80GB")
    assert estimate.peak_allocated / 2**30 == pytest.approx(simulated, rel=0.005)


def test_a_middle_stage_of_a_pipeline_has_neither_embedding_nor_head():
    run = lab.Training(seq_len=4096, dp=16, pp=4, accumulation=8, stack="torchtitan")
    assert "logits" not in lab.estimate(LLAMA, run, "H100-80GB").parts


def test_eager_operators_of_a_block_move_what_they_read_and_write():
    """In halves. Forward: two norms, two sums, a rotation by way of complex numbers, SiLU and its product. Backward: as
    many, the sums of the gradients from all that read one tensor."""
    h, f, heads = 4096, 14336, 4096 + 1024
    forward = 2 * 4 * h + 2 * 6 * h + heads * (4 + 16) + 5 * 2 * f
    backward = 2 * 6 * h + (2 * 6 + 3 * 6) * h + heads * (4 + 16) + 9 * 2 * f
    run = lab.Training(seq_len=TOKENS, dp=8, stack="torchtitan:ac=none")

    def moved(**changes):
        return block(share_of(LLAMA, replace(run, **changes))) / TOKENS

    assert moved() == forward + backward
    assert moved(stack="torchtitan:ac=full") == 2 * forward + backward
    written_out = moved(stack="torchtitan:ac=none,norm_type=rmsnorm")
    assert written_out - moved() == 2 * h * (36 - 4 + 92 - 6)  # test_traffic.py counts those
    halves = moved(tp=2, sequence_parallel=True) - moved() / 2
    assert halves == 3 * 6 * h / 2  # sums of the gradients of weights that every rank has whole
