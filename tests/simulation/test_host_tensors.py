"""Tensors that a script moves between the host and the GPU."""

import copy
import warnings

import pytest
import torch
from torch import nn

import llmlab as lab

pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.mark.parametrize("pinned", [False, True])
def test_activations_kept_on_the_host_take_nothing_of_the_card(card, pinned):
    layers = [nn.Linear(256, 256), nn.Dropout(0.1), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(1024, 256, device="cuda", requires_grad=True)
    model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    before = card.allocated
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        y = model(x)
        assert card.allocated - before == 1024 * 256 * 4  # the output alone
    y.sum().backward()


def test_data_that_is_set_brings_its_device(card):
    """As adapters' initialization and offloading by hand do it; the old data goes."""
    weight = nn.Parameter(torch.zeros(256, 256))
    weight.data = torch.ones(256, 256, device="cuda")
    assert weight.is_cuda and (weight * torch.ones(256, device="cuda")).is_cuda
    weight.data = weight.data.cpu()
    assert not weight.is_cuda and card.allocated == 0


def test_copies_on_the_host_take_nothing_of_the_card(card):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
    before = card.allocated
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average = copy.deepcopy(model)
    assert card.allocated == 2 * before
    average.cpu()
    kept = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    assert card.allocated == before and average(torch.randn(3, 8)).device.type == "cpu"
    model.load_state_dict(kept)

CARD, RANKS = "A100-40GB", 8


def test_pinned_memory_is_a_power_of_two():
    with lab.simulator(CARD) as sim:
        weight = nn.Parameter(torch.empty(3 * 2**18)).pin_memory()
        assert weight.is_pinned() and sim.host_pinned == 4 * 2**20 and sim.host_peak == 7 * 2**20
