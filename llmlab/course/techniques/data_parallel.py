"""Data parallelism from scratch: each rank has a copy of the model and a share of the batch; gradients are averaged.

    python -m llmlab.course.experiments data_parallel --ranks 2 --steps 20 --engine scratch --method buckets --json

There are three ways to average, and each waits less than the one before: after the backward pass
(`average_gradients`), during the backward pass parameter by parameter (`Overlapped` with bucket_bytes=0), and during it
in buckets (`Overlapped`), as torch's DDP does.

    dp  ranks      n  elements of a flat tensor. It consists of dp chunks, and chunk r belongs to rank r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import SpecError
from ...formulas.time.distributed import BUCKET_BYTES

METHODS = ("naive", "hooks", "buckets")


# ---- ring collectives (Patarasuk and Yuan 2009, section 3): each rank communicates only with its two neighbours


def pass_on(outgoing: Tensor, arriving: Tensor) -> list[dist.Work]:
    """Start to send `outgoing` to the next rank and receive `arriving` from the previous one; return the requests."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    requests = (dist.isend(outgoing, (rank + 1) % ranks), dist.irecv(arriving, (rank - 1) % ranks))
    return [request for request in requests if request is not None]  # None on ranks outside the group


def _around(flat: Tensor, first: int, combine: Callable[[Tensor, Tensor], Tensor]) -> int:
    """Send chunk `first` of `flat`, (n,), then dp - 2 times the chunk that has just arrived; return the bytes sent.

    `combine` adds or copies the arriving chunk into this rank's own chunk, in place.
    """
    ranks = dist.get_world_size()
    chunks, sent = flat.tensor_split(ranks), 0
    for number in range(first, first - ranks + 1, -1):
        outgoing, own = chunks[number % ranks], chunks[(number - 1) % ranks]
        arriving = torch.empty_like(own)
        for request in pass_on(outgoing, arriving):
            request.wait()
        combine(own, arriving)
        sent += outgoing.nbytes
    return sent


def ring_reduce_scatter(flat: Tensor) -> int:
    """Sum `flat`, (n,), over ranks in place: chunk r is then complete on rank r, and its other chunks are partial sums.

    Returns the bytes that this rank sent, which are dp - 1 chunks, or (dp - 1) / dp of the tensor.
    """
    return _around(flat, dist.get_rank() - 1, Tensor.add_)


def ring_all_gather(flat: Tensor) -> int:
    """Fill `flat`, (n,), in place with the chunks of all ranks; return the bytes sent, (dp - 1) / dp of the tensor."""
    return _around(flat, dist.get_rank(), Tensor.copy_)


def ring_all_reduce(flat: Tensor) -> int:
    """Sum `flat`, (n,), over ranks in place; return the bytes that this rank sent, 2 (dp - 1) / dp of the tensor.

    If ranks do the sums, no algorithm sends less from every rank (Patarasuk and Yuan 2009, theorem 1).
    """
    return ring_reduce_scatter(flat) + ring_all_gather(flat)


# ---- averaging gradients


def same_model(model: nn.Module) -> None:
    """Copy rank 0's parameters to every rank; raise SpecError on all ranks if shapes or dtypes differ between ranks.

    A collective operation on unequal shapes hangs or mixes tensors up, so call this function before the first one.
    """
    mine = {name: (tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()}
    shapes_by_rank: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(shapes_by_rank, mine)
    first = shapes_by_rank[0]
    for rank, shapes in enumerate(shapes_by_rank):
        for name in {**first, **shapes}:
            if shapes.get(name) != first.get(name):
                raise SpecError(f"{name} is {first.get(name)} on rank 0 and {shapes.get(name)} on rank {rank}")
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def average_gradients(model: nn.Module) -> int:
    """Replace every gradient by its mean over ranks, one all-reduce after the other; return the bytes sent.

    Call it after the backward pass. The links are then idle during the backward pass, and the GPU during communication.
    """
    sent = 0
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1 / dist.get_world_size())
            flat = parameter.grad.contiguous().view(-1)
            sent += ring_all_reduce(flat)
            parameter.grad.copy_(flat.view_as(parameter.grad))
    return sent


class Overlapped:
    """Average gradients during the backward pass: the all-reduce of a bucket starts when its gradients are complete.

    The last layer comes first, because the backward pass reaches it first. `bucket_bytes` is the largest size of a
    bucket; 0 sends each parameter separately. Inside a bucket, parameters are in the model's order, as in DDP's first
    backward pass: with three or more ranks, the position of an element decides in which order ranks are added, which
    changes its last bit. Call `wait()` between the backward pass and the update. `messages` counts all-reduces.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        if bucket_bytes < 0:
            raise SpecError(f"bucket_bytes={bucket_bytes} is negative; 0 sends each parameter separately")
        same_model(model)
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.buckets = [bucket[::-1] for bucket in buckets(list(self.names)[::-1], bucket_bytes)]
        self.missing = [set(bucket) for bucket in self.buckets]  # parameters without a gradient so far
        self.sync, self.messages = True, 0
        self.pending: list[tuple[int, Tensor, dist.Work]] = []
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                # This hook runs when .grad is complete. A hook on the tensor itself would run before the accumulation.
                parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._arrived(index, p))

    def _arrived(self, index: int, parameter: nn.Parameter) -> None:
        if not self.sync:
            return
        self.missing[index].discard(parameter)
        if not self.missing[index]:
            # Send the gradient, not the parameter that the hook receives. Averaging parameters would raise no error,
            # but the gradients of the ranks would stay different.
            flat = flat_gradients(self.buckets[index])  # (elements of the bucket,)
            flat.mul_(1 / dist.get_world_size())  # before the sum, as DDP does: the sum could overflow in fp16
            self.pending.append((index, flat, dist.all_reduce(flat, async_op=True)))
            self.messages += 1

    def wait(self) -> None:
        """Copy the averages into .grad; raise RuntimeError for parameters that the backward pass did not reach."""
        if absent := [self.names[p] for missing in self.missing for p in missing]:
            raise RuntimeError(f"no gradient for {', '.join(sorted(absent))}: is it used in the loss?")
        for index, flat, request in self.pending:
            request.wait()
            bucket = self.buckets[index]
            for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                assert parameter.grad is not None  # it was sent
                parameter.grad.copy_(mean.view_as(parameter))
            self.missing[index] = set(bucket)
        self.pending.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication, for all micro-batches of a step except the last."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True


def buckets(parameters: list[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Split parameters into runs of one dtype and at most `most` bytes; a larger parameter gets a run of its own."""
    runs: list[list[nn.Parameter]] = []
    for parameter in parameters:
        last = runs[-1] if runs else []
        if not last or last[0].dtype != parameter.dtype or sum(p.nbytes for p in last) + parameter.nbytes > most:
            runs.append([])
        runs[-1].append(parameter)
    return runs


def flat_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """Return the gradients of `parameters` as one flat tensor, (n,); raise RuntimeError if one has no gradient."""
    gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
    if len(gradients) < len(parameters):
        absent = [tuple(p.shape) for p in parameters if p.grad is None]
        raise RuntimeError(f"no gradient for parameters of shape {absent}: are they used in the loss?")
    return torch.cat(gradients)


def spread(model: nn.Module) -> float:
    """Return the largest difference of a gradient's element between any rank and rank 0: 0.0 if they are averaged.

    The loss does not reveal missing averages, because each rank can train on its own gradients.
    """
    flat = flat_gradients([p for p in model.parameters() if p.requires_grad])  # (n,)
    theirs = flat.clone()
    dist.broadcast(theirs, src=0)
    worst = (flat - theirs).abs().max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()
