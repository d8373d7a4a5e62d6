"""torchtitan's block, its bytes written out by hand, and the peaks that its own code took."""


import llmlab as lab
from llmlab.formulas.memory.activations import checkpointed
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.stacks.described import Kept, Saved, by_kind, read, saved

LLAMA = lab.model("meta-llama/Meta-Llama-3-8B")  # h 4096, f 14336, Q 4096, K 1024, H 32
H, F, Q, K, HEADS = 4096, 14336, 4096, 1024, 32
TOKENS = 8192


def share(**given):
    return share_of(LLAMA, lab.Training(**{"seq_len": TOKENS, "dp": 8, "stack": "torchtitan", **given}))


def test_tensor_parallelism_keeps_what_reduce_scatter_returned():
    split = TOKENS * (2 * (Q + K + F) + 2 * Q + 4 * HEADS) // 2 + TOKENS * 2 * H
    assert sum(checkpointed(share(tp=2)).values()) == split + TOKENS * 2 * H // 2 + 2 * TOKENS * 2 * H // 2


def test_a_rank_has_its_share_of_heads_and_of_tokens_where_the_sequence_is_cut():
    rows = [Saved("a", 80, "heads"), Saved("a", 40, "tokens"), Saved("b", 20, "whole")]
    assert by_kind(rows, 4, True) == {"a": 30, "b": 20} and by_kind(rows, 4, False) == {"a": 60, "b": 20}
    assert [row.bytes for row in saved((Kept("x", "a", "h", "fp32", "whole", 2), Kept("y", "a", "H", "byte", "heads")),
                                       share())] == [TOKENS * 2 * H * 4, TOKENS * HEADS]  # fmt: skip


def test_what_frozen_layers_read_is_kept_for_their_adapters_alone():
    """With dropout each adapter reads a tensor of its own, and keeps its mask."""
    def rows(dropout, *linears, calls=None):
        lora = lab.LoRA(8, ("q_proj", "v_proj"), dropout=dropout)
        found = read(share(lora=lora, stack="torchtune"), "x", "linear inputs", "h", *linears, calls=calls)
        return [(row.dtype, row.times) for row in found]

    assert rows(0.0, "q_proj", "k_proj") == [("product", True)] and rows(0.0, "up_proj") == [("product", False)]
    assert rows(0.1, "q_proj", "k_proj", "v_proj") == [("product", 2), ("byte", 2)]
    assert rows(0.1, "q_proj", "v_proj", calls=1) == [("product", 1), ("byte", 1)]
    assert rows(0.1, "up_proj", calls=1) == [("product", 0), ("byte", 0)]
