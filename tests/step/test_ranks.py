"""The parts of a step that a rank of several holds."""

import torch
from torch import nn

from llmlab.step.ranks import LocalShards


def test_an_optimizer_of_local_shards_steps_the_models_own_parameters():
    whole = nn.Parameter(torch.full((3,), 2.0))
    shards = LocalShards([whole])
    whole.grad = torch.ones(3)
    shards.take_gradients()
    assert whole.grad is None
    torch.optim.SGD(shards.parameters, lr=1.0).step()
    assert whole.tolist() == [1, 1, 1]
