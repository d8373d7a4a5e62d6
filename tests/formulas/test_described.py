"""torchtitan's block, its bytes written out by hand, and the peaks that its own code took."""


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
