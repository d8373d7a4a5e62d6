"""Counts of tokens by expert."""

import pytest
import torch
import torch.distributed as dist

import llmlab as lab
from llmlab.base.errors import NotAvailable

CARD, RANKS = "A100-40GB", 8
EXPERTS, TOKENS = 8, 1001


def routed(count):
    """Count tokens by expert, exchange the counts and then the tokens, as torchtitan does."""
    from torch.distributed._functional_collectives import all_to_all_single

    scores = torch.empty(TOKENS, EXPERTS, device="cuda").softmax(-1)
    counts = count(scores.topk(2).indices.view(-1))
    theirs = all_to_all_single(counts, None, None, dist.group.WORLD)
    sizes = [each.view(RANKS, -1).sum(1).cpu().tolist() for each in (counts, theirs)]
    tokens = torch.empty(2 * TOKENS, 4, device="cuda")
    return sizes[0], all_to_all_single(tokens, sizes[1], sizes[0], dist.group.WORLD)


@pytest.mark.parametrize("count", [
    lambda chosen: torch.histc(chosen, bins=EXPERTS, min=0, max=EXPERTS),
    lambda chosen: torch.bincount(chosen, minlength=EXPERTS),
])  # fmt: skip
def test_experts_get_as_many_tokens_each(count):
    with lab.simulator(CARD, world_size=RANKS) as sim:
        dist.init_process_group("nccl")
        sent, received = routed(count)
        # 2,002 choices: 251 for each of the first two of eight experts, 250 for the others, one expert a rank.
        assert sent == [251, 251, *[250] * 6] and received.shape == (RANKS * 251, 4)
        assert any(note.code == "balanced-routing" for note in sim.notes)


def test_a_count_that_has_no_number_of_bins_is_refused():
    with lab.simulator(CARD, world_size=RANKS):
        dist.init_process_group("nccl")
        with pytest.raises(NotAvailable, match=r"bincount.*minlength"):
            routed(torch.bincount)
