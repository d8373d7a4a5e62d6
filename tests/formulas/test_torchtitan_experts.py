"""What torchtitan's experts keep of a block. test_stacks.py holds the estimate to torchtitan's own code."""

import pytest

import llmlab as lab
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.stacks.described import Kept, by_kind, saved
from llmlab.formulas.memory.stacks.torchtitan_experts import EXPERTS, backward, rows
from llmlab.formulas.memory.stacks.torchtitan_experts import saved as of_block


def test_experts_keep_four_tensors_of_their_width_for_each_row():
    """What w1 and w3 returned, SiLU of the one and their product, in half. A token has 8 rows, one for each expert that
    it chose; each of 128 experts has 8 more, to which its rows are padded."""
    run = lab.Training(seq_len=1024, dp=8, stack="torchtitan:ac=none")

    def kept(width: int) -> int:
        config = {**lab.model("Qwen/Qwen3-30B-A3B").config, "moe_intermediate_size": width}
        share = share_of(lab.model(config), run)
        return by_kind(saved(of_block(share), share), 1, False)["mlp"]

    assert kept(1024) - kept(512) == 4 * 2 * 512 * (8 * 1024 + 8 * 128)


@pytest.mark.parametrize(("compile", "wide", "narrow"), [(False, [3, 2, 1], [0, 1, 2]), (True, [2, 2, 1], [0, 1, 1])])
def test_backward_has_gradients_of_each_row_where_a_product_ends(compile, wide, narrow):
    """Of w2's input, SiLU and w3; of SiLU, w1 and w3's rows; of w1 and of its and w3's rows. One compiled kernel writes
    those of w1 and w3."""
    run = lab.Training(seq_len=1024, dp=8, compile=compile, stack="torchtitan:ac=none")
    share = share_of(lab.model("Qwen/Qwen3-30B-A3B"), run)
    heights = backward(share, Kept("the stream", "temporaries", "1", "product", "tokens"))[1:4]

    def times(width: str) -> list[float]:
        return [sum(kept.times for kept in height.beside if kept.width == width) / rows(share) for height in heights]

    assert (times("m"), times("h")) == (wide, narrow)
    assert [len(height.gradients) for height in heights] == [1, 2, len(EXPERTS)]
