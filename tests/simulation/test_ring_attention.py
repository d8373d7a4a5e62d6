"""What torch's ring attention moves between its steps, counted in the simulator's log of torchtitan's first rank."""

from functools import cache
from importlib.util import find_spec

import pytest

import llmlab as lab
from llmlab.formulas.time.distributed import RING
from llmlab.simulation.report import recorded

TOKENS, WIDTH = 512, 512  # of a rank; 8 heads of 64
KINDS = ("memory", "strided", "gather")


@cache
def moved(cp: int, layers: int, kv_heads: int) -> tuple[float, float]:
    """Bytes per element of a rank's queries in forward and in backward, without FSDP2's copies of weights."""
    config = {"model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": 8,
              "num_key_value_heads": kv_heads, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 256,
              "max_position_embeddings": 4096, "tie_word_embeddings": False}  # fmt: skip
    run = lab.Training(micro_batch=1, seq_len=TOKENS * cp, dp=4, cp=cp, zero=3, precision="mixed-bf16",
                       stack="torchtitan", attention="flash")  # fmt: skip
    found = dict.fromkeys(("forward", "backward"), 0.0)
    for kernel in recorded(lab.model(config), run, lab.gpu("H100")).operators:
        weights = "foreach_copy" in kernel.name or kernel.name.startswith("fsdp")
        if kernel.phase in found and kernel.kind in KINDS and not weights:
            found[kernel.phase] += kernel.bytes / TOKENS / WIDTH
    return found["forward"], found["backward"]


def of_block(cp: int, kv_heads: int) -> tuple[float, ...]:
    return tuple(two - one for two, one in zip(moved(cp, 2, kv_heads), moved(cp, 1, kv_heads), strict=True))


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs `make stacks`")
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_the_steps_of_a_ring_move_what_the_estimate_counts(kv_heads):
    alone, two, four = (of_block(cp, kv_heads) for cp in (1, 2, 4))
    share = kv_heads / 8
    for i, (first, more) in enumerate(RING["eager"]):
        assert two[i] - alone[i] == pytest.approx(first[0] + share * first[1], rel=0.03)
        assert (four[i] - two[i]) / 2 == pytest.approx(more[0] + share * more[1], rel=0.03)
