"""Values that are known on the simulated GPU."""

import sys

import pytest
import torch
from torch import nn

from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions have no positions")


def test_the_same_computed_twice_is_the_same(card):
    tokens = torch.rand(4, 8, device="cuda").argmax(-1)
    assert torch.equal(tokens, tokens.clone()) and not torch.equal(tokens, tokens[:2])
    torch.testing.assert_close(tokens.float(), tokens.float())


def table(rows=4096):
    return torch.outer(torch.arange(rows).float(), torch.rand(32)).cos()


def test_a_large_tensor_of_the_host_is_known_on_the_card_and_not_copied():
    with simulator("T4"):
        host = table()
        module = nn.Module()
        module.register_buffer("angles", host)
        module.cuda()
        assert module.angles[0, 0] != 0 and module.angles[0, 0].item() == 1.0
        assert module.angles[100:200].cpu()[3, 3].item() == host[103, 3].item()
        assert module.angles.max().item() == host.max().item()


@pytest.mark.parametrize("write", [
    lambda host, card: host.zero_(), lambda host, card: card.zero_(), lambda host, card: card[0].add_(1),
])  # fmt: skip
def test_it_is_unknown_once_either_side_was_written_to(write):
    with simulator("T4"):
        host = table()
        card = host.cuda()
        row = card[0]
        write(host, card)
        assert str(card[0, 0].item()) == "?" and str(row[0].item()) == "?"


def test_a_write_on_the_card_leaves_the_host_as_it_is():
    with simulator("T4"):
        host = table()
        before = host.clone()
        card = host.cuda()
        card[0, :4].fill_(7.0)
        card.mul_(2)
        assert torch.equal(host, before)


def test_what_the_host_has_no_kernel_for_is_not_followed():
    with simulator("A100-80GB"):
        x = torch.ones(4, 4, device="cuda", dtype=torch.bfloat16)
        assert str(torch.mm(x, x, out_dtype=torch.float32)[0, 0].item()) == "?"


def test_values_are_followed_through_reductions(card):
    mask = torch.ones(4, 8, dtype=torch.bool, device="cuda")
    assert bool(mask.all()) and mask.sum().item() == 32 and torch.arange(5, device="cuda").max().item() == 4
