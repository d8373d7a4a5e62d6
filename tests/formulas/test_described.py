"""torchtitan's block, its bytes written out by hand, and the peaks that its own code took."""

import pytest

import llmlab as lab
from llmlab.formulas.memory.activations import checkpointed
from llmlab.formulas.memory.share import share_of

LLAMA = lab.model("meta-llama/Meta-Llama-3-8B")  # h 4096, f 14336, Q 4096, K 1024, H 32
H, F, Q, K, HEADS = 4096, 14336, 4096, 1024, 32
TOKENS = 8192


def share(**given):
    return share_of(LLAMA, lab.Training(**{"seq_len": TOKENS, "dp": 8, "stack": "torchtitan", **given}))


def test_tensor_parallelism_keeps_what_reduce_scatter_returned():
    split = TOKENS * (2 * (Q + K + F) + 2 * Q + 4 * HEADS) // 2 + TOKENS * 2 * H
    assert sum(checkpointed(share(tp=2)).values()) == split + TOKENS * 2 * H // 2 + 2 * TOKENS * 2 * H // 2


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
