"""Stage 16, 3D parallelism: your GPT on a mesh of eight real ranks ends with the weights of your trainer."""

import torch
import torch.distributed as dist
from helpers import error, momentum_sgd, padded, small_gpt, texts
from yours import pipeline, three_d, tp, trainer

from llmlab.notebook.exercises import three_d as facts
from llmlab.notebook.exercises import tp as tp_facts
from llmlab.notebook.quiz import broken
from llmlab.ranks.launch import launch

SIZES, UPDATES = {"tp": 2, "dp": 2, "pp": 2}, 3
TEXTS = torch.stack(texts([64] * 8))


def test_place_of():
    assert broken(three_d.place_of, facts.place_of) == {}


def test_groups_over():
    assert broken(three_d.groups_over, facts.groups_over) == {}


def test_average_over_mesh():
    assert broken(three_d.average_over_mesh, facts.average_over_mesh) == {}


def groups_of_a_rank():
    """Return the group and the ranks of this rank along some axes, by a frozenset of their names."""
    groups = {}
    for axes in ({"tp"}, {"dp"}, {"pp"}, {"tp", "dp"}):
        for ranks in three_d.groups_over(SIZES, list(axes)):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[frozenset(axes)] = group, ranks
    return groups


def forward_backward(share, blocks, micro_batches, collectives, neighbours):
    """Compute the gradients of the mean loss: all micro-batches go forward through both stages, and then backward."""
    stage, (before, after) = neighbours.index(dist.get_rank()), neighbours
    kept = []
    for ids in micro_batches:
        if stage == 0:
            x = share.embed(ids)
        else:
            x = torch.empty(len(ids), ids.shape[1] // collectives.tp, share.ln_f.weight.numel())
            dist.recv(x, before)
            x.requires_grad_()
        out = x
        for block in blocks:
            out = block(out)
        if stage == 0:
            dist.send(out.detach().contiguous(), after)
        else:
            logits, targets = share.logits(out)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            out = tp.vocabulary_loss(logits, targets, collectives) / len(micro_batches)
        kept.append((x, out))
    for x, out in kept:
        gradient = torch.empty_like(out)
        if stage == 0:
            dist.recv(gradient, after)
            out.backward(gradient)
        else:
            out.backward()
            dist.send(x.grad, before)


def train_on_a_rank():
    """Return how far each weight of this rank is, after all updates, from its share of a GPT of your trainer."""
    place, groups = three_d.place_of(dist.get_rank(), SIZES), groups_of_a_rank()
    collectives = tp.Collectives(groups[frozenset({"tp"})][0])
    share, whole = tp.ShardedGPT(small_gpt(), collectives, sequence_parallel=True), small_gpt()
    start = {name: weight.detach().clone() for name, weight in share.named_parameters()}
    blocks = torch.arange(len(share.h)).split(pipeline.cut([1.0] * len(share.h), SIZES["pp"]))[place["pp"]]
    mine = TEXTS[place["dp"] :: SIZES["dp"]].chunk(2)  # two micro-batches
    pp_group, neighbours = groups[frozenset({"pp"})]

    def all_reduce(tensor, axes):
        dist.all_reduce(tensor, group=groups[frozenset(axes) & {"tp", "dp"}][0])

    optimizer, reference = momentum_sgd(share.parameters()), momentum_sgd(whole.parameters())
    for _ in range(UPDATES):
        optimizer.zero_grad()
        forward_backward(share, share.h[blocks[0] : blocks[-1] + 1], mine, collectives, neighbours)
        dist.all_reduce(share.words.grad, group=pp_group)  # the embedding is on the first stage, the head on the last
        named = {name: weight for name, weight in share.named_parameters() if weight.grad is not None}
        pairs = [(weight, "ln_" not in name) for name, weight in named.items()]  # only the norms are whole
        three_d.average_over_mesh(pairs, {**SIZES, "cp": 1}, True, all_reduce)
        optimizer.step()
        trainer.update(whole, [padded(list(TEXTS))], reference)
    expected = tp.ShardedGPT(whole, collectives, sequence_parallel=True)
    return {name: error(named[name] - start[name], expected.get_parameter(name) - start[name]) for name in named}


def test_a_mesh_of_eight_ranks_ends_with_the_weights_of_one_process():
    share = tp.ShardedGPT(small_gpt(), tp_facts.alone())  # a rank cannot say that a function is not written yet
    tp.vocabulary_loss(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long), tp_facts.alone())
    three_d.place_of(0, SIZES), three_d.groups_over(SIZES, ["tp"]), pipeline.cut([1.0, 1.0], 2)
    three_d.average_over_mesh([], {**SIZES, "cp": 1}, True, None)
    names = {name for name, _ in share.named_parameters()}
    errors = launch(train_on_a_rank, 8, patience=120)
    assert set().union(*errors) == names  # every weight is trained on a stage
    assert all(len(of_rank) < len(names) for of_rank in errors)  # and no rank trains all
    assert max(value for of_rank in errors for value in of_rank.values()) < 1e-3, errors
