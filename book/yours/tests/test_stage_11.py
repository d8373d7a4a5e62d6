"""Stage 11, Data parallelism: two real ranks train as one process."""

import torch
from helpers import error, moved, padded, plain_gradient, small_gpt, texts, updates_of_a_rank
from yours import ddp, time

from llmlab.notebook.exercises import ddp as facts
from llmlab.notebook.exercises import time as time_facts
from llmlab.notebook.quiz import broken
from llmlab.ranks.launch import launch


def test_average_in_backward():
    assert broken(ddp.average_in_backward, facts.average_in_backward) == {}


def test_share():
    assert broken(ddp.share, facts.share) == {}


def test_averaged_at():
    assert broken(time.averaged_at, time_facts.averaged_at) == {}


def test_one_rank_alone_keeps_its_gradients():
    model = small_gpt()
    ddp.average_in_backward(list(model.parameters()), 1, lambda flat: None, 100_000)
    assert torch.equal(moved([padded(texts())], model), moved([padded(texts())]))


def test_two_ranks_make_the_update_of_one_process():
    ddp.average_in_backward([], 1, None, 0), ddp.share(1, 0, 1, 0)  # a rank cannot say that they are not written yet
    lengths = [64] * 8  # each rank divides by its own labels, so all ranks need equally many
    ranks = launch(updates_of_a_rank, 2, lengths, (1, 2), patience=60)
    for one, other in zip(*ranks, strict=True):
        assert one == other
        assert error(torch.tensor(one), plain_gradient(texts(lengths))) < 1e-3
