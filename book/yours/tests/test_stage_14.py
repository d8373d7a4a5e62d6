"""Stage 14, Tensor parallelism: two real ranks, each with half of every matrix, compute what your whole GPT does."""

import pytest
import torch
from helpers import error, plain_gradient, shares_of_a_rank, small_gpt, texts, whole_gpt
from yours import tp

from llmlab.notebook.exercises import tp as facts
from llmlab.notebook.quiz import broken
from llmlab.ranks.launch import launch


def test_conjugates():
    assert broken(tp.conjugates, facts.conjugates) == {}


def test_shard_linear():
    assert broken(tp.shard_linear, facts.shard_linear) == {}


def test_vocabulary_loss():
    assert broken(tp.vocabulary_loss, facts.vocabulary_loss) == {}


def test_one_rank_alone_has_the_whole_gpt():
    share, ids = tp.ShardedGPT(small_gpt(), facts.alone()), torch.stack(texts([64] * 2))
    assert torch.allclose(share(ids), small_gpt()(ids), atol=1e-5)
    tp.vocabulary_loss(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long), facts.alone())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_have_the_logits_the_loss_and_the_gradients_of_the_whole_gpt(sequence_parallel):
    test_one_rank_alone_has_the_whole_gpt()  # a rank cannot say that a function is not written yet
    ids = torch.stack(texts([64] * 2))
    logits, loss = whole_gpt(ids)
    assert plain_gradient(texts([64] * 2)).norm() > 0.1
    for rank in launch(shares_of_a_rank, 2, sequence_parallel, patience=60):
        assert error(torch.tensor(rank["logits"]), logits) < 1e-4
        assert abs(rank["loss"] - loss) < 1e-5
        assert max(rank["errors"].values()) < 1e-3, rank["errors"]
        assert rank["elements"] < 0.55 * sum(weight.numel() for weight in small_gpt().parameters())
