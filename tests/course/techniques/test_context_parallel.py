"""Attention over the tokens of several ranks equals attention over all tokens on one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

from llmlab.base.errors import SpecError
from llmlab.course.techniques import context_parallel as cp
from llmlab.ranks.launch import launch

RANKS = 3
CASES = [(balanced, heads, kv) for balanced in (False, True) for heads, kv in ((2, 2), (4, 2))]


def against_the_whole(balanced, heads, kv_heads):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, h, 24, 8, dtype=torch.float64) for h in (heads, kv_heads, kv_heads, heads))
    mine = cp.positions(24, dist.get_rank(), RANKS, balanced)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected.backward(grad)
    parts = [t[:, :, mine].clone().requires_grad_() for t in (q, k, v)]
    out = cp.ring_attention(*parts, balanced=balanced, tile=4)
    out.backward(grad[:, :, mine])
    apart = [(part.grad - t.grad[:, :, mine]).abs().max().item() for part, t in zip(parts, whole, strict=True)]
    return [(out - expected[:, :, mine]).abs().max().item(), *apart]


def by_ulysses():
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, h, 24, 8, dtype=torch.float64) for h in (6, 3, 3, 6))
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected.backward(grad)
    mine = cp.positions(24, dist.get_rank(), RANKS, balanced=False)
    parts = [t[:, :, mine].clone().requires_grad_() for t in (q, k, v)]
    out = cp.ulysses_attention(*parts)
    out.backward(grad[:, :, mine])
    apart = [(part.grad - t.grad[:, :, mine]).abs().max().item() for part, t in zip(parts, whole, strict=True)]
    try:
        cp.ulysses_attention(*(torch.zeros(1, heads, 4, 8) for heads in (4, 2, 2)))
    except SpecError as error:
        return [(out - expected[:, :, mine]).abs().max().item(), *apart], str(error)


def messages():
    q, k, v = (torch.randn(1, 2, 4, 8).requires_grad_() for _ in range(3))
    sizes = []
    send = dist.isend

    def counted(x, *args, **kwargs):
        sizes.append(x.nbytes)
        return send(x, *args, **kwargs)

    dist.isend = counted
    try:
        out = cp.ring_attention(q, k, v)
        forward = sum(sizes)
        out.sum().backward()
    finally:
        dist.isend = send
    with CommDebugMode() as others:
        cp.ring_attention(q, k, v)
    return {"forward": forward, "backward": sum(sizes) - forward, "collectives": others.get_total_counts()}


def everything():
    cases = [against_the_whole(*case) for case in CASES]
    return {"cases": cases, "messages": messages(), "ulysses": by_ulysses()}


@pytest.fixture(scope="module")
def ranks():
    return launch(everything, RANKS)


@pytest.mark.parametrize("case", range(len(CASES)), ids=map(str, CASES))
def test_output_and_gradients_are_those_of_all_tokens_together(ranks, case):
    assert max(max(rank["cases"][case]) for rank in ranks) < 1e-12  # fp64


def test_ulysses_exchanges_tokens_for_heads(ranks):
    for rank in ranks:
        errors, refused = rank["ulysses"]
        assert max(errors) < 1e-12
        assert refused == "cp=3 does not divide the 2 key heads, and Ulysses moves whole heads"


def test_keys_and_values_go_around_once_forward_and_with_their_gradients_backward(ranks):
    keys_and_values = 2 * 2 * 4 * 8 * 4  # bytes of one rank
    found = ranks[0]["messages"]
    assert found == {
        "forward": (RANKS - 1) * keys_and_values, "backward": RANKS * 2 * keys_and_values, "collectives": 0
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_two_chunks_a_rank_share_the_work_equally(ranks):
    assert {round(cp.work(rank, ranks), 12) for rank in range(ranks)} == {round(1 / ranks, 12)}
    everyone = torch.cat([cp.positions(4 * ranks, rank, ranks) for rank in range(ranks)])
    assert everyone.sort().values.tolist() == list(range(4 * ranks))


def test_one_chunk_a_rank_gives_the_last_nearly_all():
    assert [round(cp.work(rank, 4, balanced=False), 4) for rank in range(4)] == [0.0625, 0.1875, 0.3125, 0.4375]


def test_lengths_that_do_not_divide_are_refused():
    with pytest.raises(SpecError, match="seq_len=10 is not a multiple of 4"):
        cp.positions(10, 0, 2)
    with pytest.raises(SpecError, match="3 tokens per rank"):
        cp.ring_attention(*(torch.zeros(1, 1, 3, 4) for _ in range(3)))
