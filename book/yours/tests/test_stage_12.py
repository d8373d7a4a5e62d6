"""Stage 12, ZeRO: at each stage of ZeRO, two real ranks end with the weights of one process, and with those of DDP."""

import torch
from helpers import error, momentum_sgd, padded, small_gpt, texts, weights_of_a_rank
from torch.nn.utils import parameters_to_vector
from yours import ddp, trainer, zero

from llmlab.notebook.exercises import zero as facts
from llmlab.notebook.quiz import broken
from llmlab.ranks.launch import launch

RUNS = (  # stage (0 is DDP), micro-batches, blocks that are checkpointed
    (0, 1, 0),
    (1, 1, 0),
    (1, 2, 0),
    (2, 2, 0),
    (3, 2, 0),
    (3, 1, 4),
)


def test_sharded_optimizer():
    assert broken(zero.ShardedOptimizer, facts.ShardedOptimizer) == {}


def test_reduce_in_backward():
    assert broken(zero.reduce_in_backward, facts.reduce_in_backward) == {}


def test_gather_around():
    assert broken(zero.gather_around, facts.gather_around) == {}


def test_every_stage_has_the_weights_of_one_process_and_of_ddp():
    ddp.average_in_backward([], 1, None, 0), ddp.share(1, 0, 1, 0)  # a rank cannot say that they are not written yet
    unit = zero.Unit(torch.nn.Linear(1, 1).parameters(), 0, 1)
    zero.reduce_in_backward(unit, None), zero.gather_around(torch.nn.Identity(), unit, None)
    zero.ShardedOptimizer([], lambda chunks: torch.optim.SGD([torch.zeros(1)]), None).step()
    lengths, updates = [64] * 8, 3  # each rank divides by its own labels, so all ranks need equally many
    ranks = launch(weights_of_a_rank, 2, lengths, updates, RUNS, patience=120)
    assert ranks[0] == ranks[1]
    model = small_gpt()
    before = parameters_to_vector(model.parameters()).detach()
    optimizer = momentum_sgd(list(model.parameters()))
    for _ in range(updates):
        trainer.update(model, [padded(texts(lengths))], optimizer)
    moved = parameters_to_vector(model.parameters()).detach() - before
    by_ddp = torch.tensor(ranks[0][0]) - before
    for run, weights in zip(RUNS, ranks[0], strict=True):
        assert error(torch.tensor(weights) - before, moved) < 1e-3, run
        assert error(torch.tensor(weights) - before, by_ddp) < 1e-3, run
