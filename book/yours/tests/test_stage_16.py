"""Stage 16, 3D parallelism: the gradients of a mesh of real ranks are those of one process."""

import torch
import torch.distributed as dist
from helpers import error
from torch import nn
from yours import three_d

from llmlab.notebook.exercises import three_d as facts
from llmlab.notebook.quiz import broken
from llmlab.ranks.launch import launch

SIZES = {"tp": 2, "dp": 2}


def test_place_of():
    assert broken(three_d.place_of, facts.place_of) == {}


def test_groups_over():
    assert broken(three_d.groups_over, facts.groups_over) == {}


def test_average_over_mesh():
    assert broken(three_d.average_over_mesh, facts.average_over_mesh) == {}


def batch():
    torch.manual_seed(0)
    return torch.randn(2, 4, 6), torch.randn(6), torch.randn(8, 6)  # sequences, a scale and a matrix


def loss_of(x, scale, matrix):
    return ((x * scale) @ matrix.T).square().sum(-1).mean()


def gradients_of_a_rank():
    """Return the place of a rank, and its gradients. It computes the loss of one of two sequences, and has half of the
    rows of the matrix. The tensor-parallel ranks scale half of the tokens each, as with sequence parallelism."""
    x, scale, matrix = batch()
    place = three_d.place_of(dist.get_rank(), SIZES)
    groups = {}
    for axes in (("dp",), ("tp",), ("tp", "dp")):
        for ranks in three_d.groups_over(SIZES, axes):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[frozenset(axes)] = group

    def all_reduce(tensor, axes):
        dist.all_reduce(tensor, group=groups[frozenset(axes) & frozenset(SIZES)])

    scale, matrix = nn.Parameter(scale), nn.Parameter(matrix[4 * place["tp"] :][:4].clone())
    own, whole = x[place["dp"]], batch()[1]
    mine = torch.arange(4) // 2 == place["tp"]
    # Both tensor-parallel ranks need all scaled tokens. The gradients of the scale come from a rank's own tokens.
    scaled = torch.where(mine[:, None], own * scale, own * whole)
    scaled.retain_grad()
    (scaled @ matrix.T).square().sum(-1).mean().backward()
    all_reduce(scaled.grad, ("tp",))  # each rank has computed the part of its rows
    scale.grad = (scaled.grad * own)[mine].sum(0)
    sizes = {**SIZES, "cp": 1, "pp": 1}
    three_d.average_over_mesh([(scale, False), (matrix, True)], sizes, True, all_reduce)
    return place, scale.grad.tolist(), matrix.grad.tolist()


def test_four_ranks_compute_the_gradients_of_one_process():
    three_d.place_of(0, SIZES), three_d.groups_over(SIZES, ["tp"])  # a rank cannot say that they are not written yet
    three_d.average_over_mesh([], {**SIZES, "cp": 1}, True, None)
    x, *weights = batch()
    scale, matrix = [nn.Parameter(weight) for weight in weights]
    loss_of(x, scale, matrix).backward()
    for place, of_scale, of_matrix in launch(gradients_of_a_rank, 4, patience=60):
        assert error(torch.tensor(of_scale), scale.grad) < 1e-5
        assert error(torch.tensor(of_matrix), matrix.grad[4 * place["tp"] :][:4]) < 1e-5
