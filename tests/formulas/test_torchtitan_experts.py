"""What torchtitan's experts keep of a block. test_stacks.py holds the estimate to torchtitan's own code."""

import llmlab as lab
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.stacks.described import by_kind, saved
from llmlab.formulas.memory.stacks.torchtitan_experts import saved as rows


def test_experts_keep_four_tensors_of_their_width_for_each_row():
    """What w1 and w3 returned, SiLU of the one and their product, in half. A token has 8 rows, one for each expert that
    it chose; each of 128 experts has 8 more, to which its rows are padded."""
    run = lab.Training(seq_len=1024, dp=8, stack="torchtitan:ac=none")

    def kept(width: int) -> int:
        config = {**lab.model("Qwen/Qwen3-30B-A3B").config, "moe_intermediate_size": width}
        share = share_of(lab.model(config), run)
        return by_kind(saved(rows(share), share), 1, False)["mlp"]

    assert kept(1024) - kept(512) == 4 * 2 * 512 * (8 * 1024 + 8 * 128)
