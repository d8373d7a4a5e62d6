"""Your ZeRO: optimizer states, gradients and weights are sharded over the ranks."""

import torch
import torch.distributed as dist
from torch import nn

from .ddp import average_in_backward

# ---- chapter 12


class Unit:
    """Parameters in one flat tensor, of which this rank updates one of `dp` equal chunks."""

    def __init__(self, parameters, rank, dp):
        self.parameters, self.rank, self.dp = list(parameters), rank, dp
        self.sizes = [p.numel() for p in self.parameters]
        padded = -(-sum(self.sizes) // dp) * dp  # dp divides it
        self.flat = self.parameters[0].detach().new_zeros(padded)
        for p, view in zip(self.parameters, self.flat[: sum(self.sizes)].split(self.sizes)):
            view.copy_(p.detach().flatten())
            p.data = view.view_as(p)  # the parameter is now a part of the flat tensor
        self.bytes = self.flat.nbytes
        self.chunk = nn.Parameter(self.flat.chunk(dp)[rank].clone())  # for the optimizer

    def flat_gradient(self):
        """Return the gradients of the parameters in one tensor, padded like `flat`."""
        flat = self.flat.new_zeros(self.flat.numel())
        flat[: sum(self.sizes)] = torch.cat([p.grad.flatten() for p in self.parameters])
        return flat

    def whole(self):
        return self.flat.untyped_storage().size() > 0

    def free(self):
        self.flat.untyped_storage().resize_(0)

    def gather(self, all_gather):
        """Fill the flat tensor with the chunks of all ranks, if it was freed."""
        if not self.whole():
            self.flat.untyped_storage().resize_(self.bytes)
            all_gather(self.flat, self.chunk.detach())


def when_complete(parameters, act):
    """Call `act()` during each backward pass, when all gradients of `parameters` are complete."""
    missing = set(parameters)

    def arrived(parameter):
        missing.discard(parameter)
        if not missing:
            missing.update(parameters)
            act()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(arrived)


class ShardedOptimizer:
    """An optimizer that updates this rank's chunk of each unit, and gathers the weights.

    `make` returns an optimizer for a list of parameters, for which it gets the chunks.
    `all_gather(flat, chunk)` fills `flat` with the chunks of all ranks.
    """

    def __init__(self, units, make, all_gather):
        self.units, self.all_gather = units, all_gather
        self.optimizer = make([unit.chunk for unit in units])
        self.param_groups = self.optimizer.param_groups

    def zero_grad(self):
        for unit in self.units:
            for parameter in [*unit.parameters, unit.chunk]:
                parameter.grad = None

    def step(self):
        """Update the chunks, then all-gather the flat tensors of all units that are whole.

        A chunk without a gradient takes it from `unit.flat_gradient()`, which DDP has averaged.
        """
        raise NotImplementedError


def reduce_in_backward(unit, reduce_scatter):
    """Average the gradients of a unit over the ranks as soon as all of them are complete.

    Add this rank's chunk of the average to `unit.chunk.grad`, and set the gradients of the
    parameters to None. `reduce_scatter(chunk, flat)` sums `flat` over all ranks, and writes
    this rank's chunk of the sum to `chunk`. Call it once in each backward pass.
    """
    raise NotImplementedError


def gather_around(block, unit, all_gather):
    """Free the unit of a block, and register hooks so that it is whole only while it computes.

    Gather it before the forward pass of the block and before its backward pass. Free it after
    the forward pass, and when all of its gradients are complete. Checkpointing repeats the
    forward pass within the backward pass, which still needs the weights: do not free them then.
    """
    raise NotImplementedError


def shard(model, blocks, stage, make):
    """Return an optimizer for `update` that applies a stage of ZeRO to the model."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    in_blocks = {p for block in blocks for p in block.parameters()}
    others = [p for p in model.parameters() if p not in in_blocks]
    units = [Unit(parameters, rank, dp) for parameters in
             [*(block.parameters() for block in blocks), others]]  # fmt: skip
    if stage == 1:
        average_in_backward(list(model.parameters()), dp, dist.all_reduce, 25 * 2**20)
    for unit in units if stage > 1 else []:
        reduce_in_backward(unit, dist.reduce_scatter_tensor)
    for block, unit in zip(blocks, units) if stage == 3 else []:
        gather_around(block, unit, dist.all_gather_into_tensor)
    return ShardedOptimizer(units, make, dist.all_gather_into_tensor)
