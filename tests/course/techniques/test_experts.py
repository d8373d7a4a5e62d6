"""Experts from scratch give Mixtral's block, on one rank and on several."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from llmlab.base.errors import SpecError
from llmlab.course.techniques.experts import MoE, balancing_loss, capacity, route, within_capacity
from llmlab.ranks.launch import launch

HIDDEN, WIDTH, EXPERTS, K = 16, 24, 8, 2


def mixtral():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    block = MixtralSparseMoeBlock(
        MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=K,
            experts_implementation="eager",
        )
    )  # fmt: skip
    return random(block)


def random(block):
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block


def ours(theirs, parallel=False, **options):
    block = MoE(HIDDEN, WIDTH, EXPERTS, K, parallel=parallel, **options)
    rank = dist.get_rank() if parallel else 0
    with torch.no_grad():
        block.gate.weight.copy_(theirs.gate.weight)
        for name in ("gate_up_proj", "down_proj"):
            mine = getattr(theirs.experts, name).tensor_split(block.ranks)[rank]
            getattr(block.experts, name).copy_(mine)
    return block


def x_of(rank):
    return torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(rank))


def in_parallel():
    """Run in each rank: what expert parallelism gives for this rank's tokens, and gradients of this rank's experts.

    Held to the same block on one rank, and that below to Mixtral's, whose import four ranks need not repeat.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole_block = random(MoE(HIDDEN, WIDTH, EXPERTS, K))
    block = ours(whole_block, parallel=True)
    expected = [whole_block(x_of(r)) for r in range(ranks)]
    sum(y.square().sum() for y in expected).backward()
    x = x_of(rank).requires_grad_()
    y = block(x)
    y.square().sum().backward()
    alone = x_of(rank).requires_grad_()
    whole_block(alone).square().sum().backward()
    whole_block.zero_grad()
    sum(whole_block(x_of(r)).square().sum() for r in range(ranks)).backward()
    whole = whole_block.experts.gate_up_proj.grad.tensor_split(ranks)[rank]
    limited, one = ours(whole_block, parallel=True, factor=1.0), ours(whole_block, factor=1.0)
    return {
        "output": (y - expected[rank]).abs().max().item(),
        "input": (x.grad - alone.grad).abs().max().item(),
        "experts": (block.experts.gate_up_proj.grad - whole).abs().max().item() / whole.abs().max().item(),
        "held": block.experts.gate_up_proj.numel(),
        "limited": (limited(x_of(rank)) - one(x_of(rank))).abs().max().item(),
    }


@pytest.fixture(scope="module")
def ranks():
    return launch(in_parallel, 4)


def test_output_and_gradients_are_mixtrals():
    theirs = mixtral()
    block, x = ours(theirs), x_of(0)
    ours_x, theirs_x = (x.clone().requires_grad_() for _ in range(2))
    (out := block(ours_x)).square().sum().backward()
    (expected := theirs(theirs_x)).square().sum().backward()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(block.gate.weight.grad, theirs.gate.weight.grad, atol=1e-5, rtol=1e-4)
    for name in ("gate_up_proj", "down_proj"):
        torch.testing.assert_close(
            getattr(block.experts, name).grad, getattr(theirs.experts, name).grad, atol=1e-5, rtol=1e-4
        )


def test_experts_on_four_ranks_give_what_one_rank_gives(ranks):
    assert max(rank["output"] for rank in ranks) < 1e-4
    assert max(rank["input"] for rank in ranks) < 1e-3
    assert max(rank["experts"] for rank in ranks) < 1e-5
    assert {rank["held"] for rank in ranks} == {EXPERTS // 4 * 2 * WIDTH * HIDDEN}
    assert max(rank["limited"] for rank in ranks) < 1e-5


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 1000))
def test_balancing_loss_is_transformers_and_equal_shares_give_k(tokens, k, seed):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    experts, _ = route(logits, k)
    expected = load_balancing_loss_func((logits,), EXPERTS, k)
    torch.testing.assert_close(balancing_loss(logits, experts), expected)
    turns = (torch.arange(EXPERTS)[:, None] + torch.arange(k)) % EXPERTS  # each expert chosen k times
    assert balancing_loss(torch.zeros(EXPERTS, EXPERTS), turns).item() == pytest.approx(k)


@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 12), st.integers(0, 1000))
def test_an_expert_takes_no_more_than_its_capacity_and_first_choices_first(tokens, k, most, seed):
    logits = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed))
    experts, weights = route(logits, k)
    torch.testing.assert_close(weights.sum(1), torch.ones(tokens))
    served = within_capacity(experts, EXPERTS, most)
    for expert in range(EXPERTS):
        asks = [(choice, token) for token in range(tokens) for choice in range(k) if experts[token, choice] == expert]
        taken = [(choice, token) for choice, token in asks if served[token, choice]]
        assert sorted(taken) == sorted(asks)[:most]


def test_a_token_that_nobody_serves_passes_by():
    torch.manual_seed(0)
    block = MoE(HIDDEN, WIDTH, EXPERTS, 1, factor=0.5)
    block.gate.weight.data.zero_()
    block.gate.weight.data[3] = 1.0  # all 16 tokens choose expert 3, which serves one
    y = block(torch.ones(1, 16, HIDDEN))[0]
    assert capacity(16, EXPERTS, 1, 0.5) == 1 and block.dropped == 15 / 16
    assert y[0].abs().max() > 0 and y[1:].abs().max() == 0


@pytest.mark.parametrize(("options", "words"), [({"K": 9}, "give 1 to 8"), ({"K": 1, "factor": 0.0}, "factor=0.0")])
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(SpecError, match=words):
        MoE(HIDDEN, WIDTH, EXPERTS, **options)
