"""A tensor-parallel Llama computes what the whole one does, and sends as many bytes as the papers say."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from llmlab.base.errors import SpecError
from llmlab.course.architectures.llama import Llama
from llmlab.course.experiments.job import TINY_LLAMA, Job, tiny_llama
from llmlab.course.experiments.train import check, train
from llmlab.course.techniques import tensor_parallel as tp
from llmlab.course.techniques.training_loop import next_token_loss
from llmlab.ranks.launch import launch
from llmlab.specs.model import model
from llmlab.specs.run import Training

RANKS = 4
TOLERANCE = 1e-4  # of a gradient's largest value: fp32 sums in another order make 1e-6


def llama(**changes):
    torch.manual_seed(0)
    return Llama(model({**TINY_LLAMA, "num_hidden_layers": 2, **changes}))


def piece(whole, like):
    """This rank's share of a whole tensor, cut where the shapes differ."""
    dims = [dim for dim in range(whole.ndim) if whole.shape[dim] != like.shape[dim]]
    return whole.tensor_split(dist.get_world_size(), dims[0])[dist.get_rank()] if dims else whole


def against_the_whole(sequence_parallel, tied):
    whole = llama(tie_word_embeddings=tied)
    ids = torch.randint(384, (3, 16), generator=torch.Generator().manual_seed(1))
    shard = tp.shard(copy.deepcopy(whole), sequence_parallel)
    expected = next_token_loss(whole(ids), ids)
    expected.backward()
    with CommDebugMode() as sent:
        loss = tp.next_token_loss(shard(ids), ids)
        loss.backward()
    if sequence_parallel:
        tp.sum_norm_gradients(shard)
    mine = dict(shard.named_parameters())
    apart = {
        name: ((piece(p.grad, mine[name].grad) - mine[name].grad).abs().max() / p.grad.abs().max()).item()
        for name, p in whole.named_parameters()
    }
    norm, expected_norm = tp.clip_grad_norm(shard, 0.1), nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    clipped = max((piece(p.grad, mine[n].grad) - mine[n].grad).abs().max().item() for n, p in whole.named_parameters())
    return {
        "loss": [loss.item(), expected.item()],
        "gradients": max(apart.values()),
        "norm": [norm.item(), expected_norm.item()],
        "clipped": clipped,
        "sent": {str(kind).split("::")[-1].split(".")[-1].strip("_"): n for kind, n in sent.get_comm_counts().items()},
        "parameters": sum(p.numel() for p in shard.parameters()),
    }


def kept_outside_the_pairs(sequence_parallel):
    """Bytes of what autograd saves of a block's norms and residual stream: the tensors of hidden size on this rank."""
    shard, kept = tp.shard(llama(), sequence_parallel), []
    ids = torch.randint(384, (2, 16), generator=torch.Generator().manual_seed(1))
    shapes = []
    for norm in (shard.layers[0].input_layernorm, shard.layers[0].post_attention_layernorm):
        norm.register_forward_hook(lambda _module, inputs, _out: shapes.append(list(inputs[0].shape)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        shard(ids)
    return {"shapes": shapes, "bytes": sum(kept)}


def job(engine="scratch", steps=2, **changes):
    return Job("tensor_parallel", Training(**{"micro_batch": 8, "seq_len": 64, **changes}), engine, steps)


def everything():
    found = {f"{sp} {tied}": against_the_whole(sp, tied) for sp in (False, True) for tied in (False, True)}
    found |= {f"kept {sp}": kept_outside_the_pairs(sp) for sp in (False, True)}
    jobs = {
        "scratch": job(tp=RANKS),
        "sequence": job(tp=RANKS, sequence_parallel=True),
        "torch": job("torch", tp=RANKS),
        "torch sequence": job("torch", tp=RANKS, sequence_parallel=True),
    }
    return found | {name: train(each) for name, each in jobs.items()}


@pytest.fixture(scope="module")
def ranks():
    return launch(everything, RANKS)


@pytest.fixture(scope="module")
def one():
    return launch(train, 1, job())[0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_every_gradient_are_those_of_the_whole_model(ranks, sequence_parallel, tied):
    for rank in ranks:
        found = rank[f"{sequence_parallel} {tied}"]
        assert found["loss"][0] == pytest.approx(found["loss"][1], abs=1e-5)
        assert found["gradients"] < TOLERANCE


def test_the_gradient_norm_is_over_all_ranks_and_clips_every_share_alike(ranks):
    for rank in ranks:
        norm, expected = rank["True False"]["norm"]
        assert norm == pytest.approx(expected, rel=1e-5) and norm > 0.1
        assert rank["True False"]["clipped"] < 1e-6


def test_a_block_takes_two_all_reduces_forward_and_two_backward(ranks):
    # arXiv 1909.08053, section 3. Two blocks; the embedding takes one forward, the head one backward, the loss two.
    assert ranks[0]["False False"]["sent"] == {"allreduce": 2 * (2 + 2) + 1 + 1 + 2}


def test_sequence_parallelism_makes_of_each_a_gather_and_a_scatter(ranks):
    # arXiv 2205.05198, section 4.2.2. The loss still takes its two all-reduces.
    pairs = 2 * 2 + 1  # two per block; the embedding is the end of a pair, and the head the beginning
    assert ranks[0]["True False"]["sent"] == {
        "allreduce": 2, "allgather": 2 * pairs, "reduce_scatter_base": 2 * pairs
    }  # fmt: skip


def test_only_norms_are_whole_on_every_rank(ranks):
    spec = model({**TINY_LLAMA, "num_hidden_layers": 2})
    norms = 5 * spec.hidden
    assert {rank["False False"]["parameters"] for rank in ranks} == {(spec.parameters - norms) // RANKS + norms}


def test_sequence_parallelism_also_divides_the_residual_stream(ranks):
    assert ranks[0]["kept False"]["shapes"] == [[2, 16, 64]] * 2
    assert ranks[0]["kept True"]["shapes"] == [[2, 16 // RANKS, 64]] * 2
    assert ranks[0]["kept True"]["bytes"] < ranks[0]["kept False"]["bytes"]


@pytest.mark.parametrize("engine", ["scratch", "sequence", "torch", "torch sequence"])
def test_losses_over_steps_are_those_of_one_process_and_of_parallelize_module(ranks, one, engine):
    assert ranks[0][engine]["losses"] == pytest.approx(one["losses"], abs=2e-5)


def test_states_are_divided_but_for_the_norms(ranks):
    held = ranks[0]["scratch"]["bytes"]
    spec = tiny_llama()
    norms = (2 * spec.layers + 1) * spec.hidden
    expected = 4 * ((spec.parameters - norms) // RANKS + norms)
    assert held == {"parameters": expected, "gradients": expected, "optimizer": 2 * expected}
    assert ranks[0]["torch"]["bytes"]["parameters"] == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 3}, r"tp=3 does not divide heads=8 of .*\[1, 2, 4\]"),
        ({"tp": 8}, "tp=8 does not divide kv_heads=4"),
        ({"tp": 4, "seq_len": 62, "sequence_parallel": True}, "does not divide seq_len=62"),
        ({"engine": "megatron"}, "scratch, torch"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_any_process_starts(changes, words):
    with pytest.raises(SpecError, match=words):
        check(job(**changes))
