"""Small models of yours, texts to train them on, and the gradients of an update."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector
from yours import ddp, tp, trainer, zero
from yours.gpt import GPT, Llama, initialize

V = 512
LENGTHS = [64, 40, 8, 33, 64, 5, 50]


def small_gpt():
    torch.manual_seed(0)
    return initialize(GPT(V, h=64, L=4, a=4, positions=64))


def small_llama():
    torch.manual_seed(0)
    return initialize(Llama(V, h=64, L=4, a=4, k=2, f=96))


def texts(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (length,), generator=generator) for length in lengths]


def padded(sequences):
    ids, labels = (
        torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value) for value in (0, -100)
    )
    return ids, labels


def plain_gradient(sequences, model=None):
    """Return the gradient of one batch of all sequences, by the plain loss of chapter 1."""
    model, (ids, labels) = model or small_gpt(), padded(sequences)
    F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    return parameters_to_vector([weight.grad for weight in model.parameters()])


def moved(batches, model=None, limit=math.inf, **options):
    """Return how far one update of yours moves the weights. Under SGD with a rate of 1, that is the gradient."""
    model = model or small_gpt()
    before = parameters_to_vector(model.parameters()).detach()
    trainer.update(model, batches, torch.optim.SGD(model.parameters(), lr=1.0), limit=limit, **options)
    return before - parameters_to_vector(model.parameters()).detach()


def error(one, other):
    return ((one - other).norm() / other.norm()).item()


def updates_of_a_rank(lengths, parts):
    """Run in each rank: return how far an update of yours moves the weights, from this rank's share of the texts.

    There is one update for each number of micro-batches in `parts`. If the gradients of the ranks are averaged, it
    is the update of a single process that trains on all texts.
    """
    rank, dp, everyone = dist.get_rank(), dist.get_world_size(), texts(lengths)
    mine = [everyone[number] for number in ddp.share(len(everyone), rank, dp, epoch=0)]
    updates = []
    for number in parts:
        model, size = small_gpt(), len(mine) // number
        ddp.average_in_backward(list(model.parameters()), dp, dist.all_reduce, 100_000)
        updates.append(moved([padded(mine[n : n + size]) for n in range(0, len(mine), size)], model).tolist())
    return updates


def whole_gpt(ids, model=None):
    """Return the logits of the undivided GPT and the loss, a number."""
    logits = (model or small_gpt())(ids)
    return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def shares_of_a_rank(sequence_parallel):
    """Run in each rank: return the logits of all ranks, the loss, and how far each gradient of this rank's share is
    from its share of the undivided GPT's gradient.

    A GPT whose weights are these gradients is split in the same way, so its shares are the expected ones.
    """
    ids, collectives = torch.stack(texts([64] * 2)), tp.Collectives()
    gradients, whole = small_gpt(), small_gpt()
    F.cross_entropy(whole(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, weight in gradients.named_parameters():
        weight.data = whole.get_parameter(name).grad
    expected = dict(tp.ShardedGPT(gradients, collectives, sequence_parallel).named_parameters())

    share = tp.ShardedGPT(small_gpt(), collectives, sequence_parallel)
    logits = share(ids)
    loss = tp.vocabulary_loss(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), collectives)
    loss.backward()
    if sequence_parallel:
        share.sum_norm_gradients(collectives)
    joined = collectives.all_gather(logits.detach().transpose(1, 2)).transpose(1, 2)
    errors = {name: error(weight.grad, expected[name]) for name, weight in share.named_parameters()}
    elements = sum(weight.numel() for weight in share.parameters())
    return {"logits": joined.tolist(), "loss": loss.item(), "errors": errors, "elements": elements}


def weights_of_a_rank(lengths, updates, runs):
    """Run in each rank: return the weights after some updates of yours, from this rank's share of the texts.

    A run is a stage of ZeRO, a number of micro-batches, and a number of blocks that are checkpointed. Stage 0 is DDP.
    """
    rank, dp, everyone = dist.get_rank(), dist.get_world_size(), texts(lengths)
    mine = [everyone[number] for number in ddp.share(len(everyone), rank, dp, epoch=0)]
    found = []
    for stage, number, checkpointed in runs:
        model, size = small_gpt(), len(mine) // number
        batches = [padded(mine[n : n + size]) for n in range(0, len(mine), size)]
        if stage:
            optimizer = zero.shard(model, model.h, stage, momentum_sgd)
        else:
            ddp.average_in_backward(list(model.parameters()), dp, dist.all_reduce, 100_000)
            optimizer = momentum_sgd(list(model.parameters()))
        for _ in range(updates):
            trainer.update(model, batches, optimizer, checkpointed=checkpointed)
        for unit in optimizer.units if stage else []:
            unit.gather(dist.all_gather_into_tensor)
        found.append(parameters_to_vector(model.parameters()).tolist())
    return found


def momentum_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
