"""Data parallelism from scratch: every rank has the model and a share of the batch; gradients are averaged.

    python -m llmlab.experiments data_parallel --ranks 2 --steps 20 --engine scratch --method buckets --json

Three ways to average, each doing less waiting than the one before: after backward (`average_gradients`), a parameter
at a time while backward runs (`Overlapped` with bucket_bytes=0), and in buckets (`Overlapped`), as torch's DDP does.

    N  ranks      P  elements of a flat tensor      a chunk is one of N parts of it, and rank r's own is chunk r
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import SpecError
from ..formulas.time.distributed import BUCKET_BYTES

METHODS = ("naive", "hooks", "buckets")


# ---- ring collectives (Patarasuk and Yuan 2009, section 3): each rank talks to its two neighbours only


def pass_on(outgoing: Tensor, arriving: Tensor) -> list[dist.Work]:
    """Send `outgoing` to the next rank while `arriving` is filled by the previous; return what to wait for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    under_way = (dist.isend(outgoing, (rank + 1) % ranks), dist.irecv(arriving, (rank - 1) % ranks))
    return [work for work in under_way if work is not None]  # None is given to ranks outside of a group


def _exchange(chunks: tuple[Tensor, ...], send: int, receive: int) -> tuple[Tensor, int]:
    """Send a chunk to the next rank while another comes from the previous; return that, and the bytes sent."""
    outgoing, arrived = chunks[send % len(chunks)], torch.empty_like(chunks[receive % len(chunks)])
    for request in pass_on(outgoing, arrived):
        request.wait()
    return arrived, outgoing.nbytes


def ring_reduce_scatter(flat: Tensor) -> int:
    """Sum `flat`, (P,), over ranks so that chunk r is whole on rank r; the other chunks are left half summed.

    In place. Returns the bytes this rank sent: N - 1 chunks, so (N - 1) / N of the tensor's bytes.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks, sent = flat.tensor_split(ranks), 0
    for step in range(ranks - 1):
        send, receive = rank - step - 1, rank - step - 2  # what arrived last is passed on, with this rank's part in it
        arrived, size = _exchange(chunks, send, receive)
        chunks[receive % ranks].add_(arrived)
        sent += size
    return sent


def ring_all_gather(flat: Tensor) -> int:
    """Fill `flat`, (P,), in place with every rank's own chunk. Returns the bytes sent: (N - 1) / N of the tensor's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks, sent = flat.tensor_split(ranks), 0
    for step in range(ranks - 1):
        arrived, size = _exchange(chunks, rank - step, rank - step - 1)
        chunks[(rank - step - 1) % ranks].copy_(arrived)
        sent += size
    return sent


def ring_all_reduce(flat: Tensor) -> int:
    """Sum `flat`, (P,), over ranks in place. Returns the bytes this rank sent: 2 (N - 1) / N of the tensor's.

    Each rank has to send at least that much, however the sum is made (Patarasuk and Yuan 2009, theorem 1), and the
    share does not grow with N.
    """
    return ring_reduce_scatter(flat) + ring_all_gather(flat)


# ---- averaging gradients


def same_model(model: nn.Module) -> None:
    """Give every rank rank 0's parameters; raise SpecError on all ranks where shapes or dtypes differ between them.

    A collective on unequal shapes hangs or mixes tensors up, so this stands before the first one.
    """
    mine = {name: (tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()}
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            if theirs.get(name) != everyone[0].get(name):
                raise SpecError(f"{name} is {everyone[0].get(name)} on rank 0 and {theirs.get(name)} on rank {rank}")
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def average_gradients(model: nn.Module) -> int:
    """Replace every gradient by its mean over ranks, one ring after the other; call it after backward.

    The naive way: all links are idle while backward runs, all cores while it communicates. Returns the bytes sent.
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
    """Averages gradients while backward still computes others: a bucket is sent as soon as its last gradient is there.

    Buckets come in reverse order, for backward reaches the last layer first; `bucket_bytes` is how full one may be, 0
    makes a message of each parameter. Inside a bucket parameters lie in the model's order, as in DDP's first backward:
    with three ranks and more, an element's place decides in which order it is summed, and so its last bit. Call
    `wait()` between backward and the optimizer's step. `messages` counts all-reduces.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        if bucket_bytes < 0:
            raise SpecError(f"bucket_bytes={bucket_bytes} is negative; 0 sends each parameter on its own")
        same_model(model)
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.buckets = [bucket[::-1] for bucket in buckets(list(self.names)[::-1], bucket_bytes)]
        self.missing = [set(bucket) for bucket in self.buckets]  # gradients that are still to come
        self.sync, self.messages = True, 0
        self.under_way: list[tuple[int, Tensor, dist.Work]] = []
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                # Once .grad holds the whole gradient; a hook of the tensor itself would come before it is added.
                parameter.register_post_accumulate_grad_hook(lambda p, index=index: self._arrived(index, p))

    def _arrived(self, index: int, parameter: nn.Parameter) -> None:
        if not self.sync:
            return
        self.missing[index].discard(parameter)
        if not self.missing[index]:
            # The gradient is what is sent. The parameter is equal on all ranks: its mean is itself, and a hook that
            # sent it would run without an error and average nothing.
            flat = flat_gradients(self.buckets[index])  # (elements of the bucket,)
            flat.mul_(1 / dist.get_world_size())  # before the sum, as DDP does: fp16 would overflow after it
            self.under_way.append((index, flat, dist.all_reduce(flat, async_op=True)))
            self.messages += 1

    def wait(self) -> None:
        """Put the averages into .grad; raise RuntimeError for parameters that backward did not reach."""
        if absent := [self.names[p] for missing in self.missing for p in missing]:
            raise RuntimeError(f"no gradient for {', '.join(sorted(absent))}: is it used in the loss?")
        for index, flat, work in self.under_way:
            work.wait()
            bucket = self.buckets[index]
            for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                assert parameter.grad is not None  # it was among what was sent
                parameter.grad.copy_(mean.view_as(parameter))
            self.missing[index] = set(bucket)
        self.under_way.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank: for all micro-batches of a step but the last."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True


def buckets(parameters: list[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Cut a list of parameters into runs of one dtype and at most `most` bytes, or of one parameter."""
    found: list[list[nn.Parameter]] = []
    for parameter in parameters:
        last = found[-1] if found else []
        if not last or last[0].dtype != parameter.dtype or sum(p.nbytes for p in last) + parameter.nbytes > most:
            found.append([])
        found[-1].append(parameter)
    return found


def flat_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """Return their gradients as one flat tensor, (P,); raises RuntimeError where backward did not reach one."""
    gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
    if len(gradients) < len(parameters):
        absent = [tuple(p.shape) for p in parameters if p.grad is None]
        raise RuntimeError(f"no gradient for parameters of shape {absent}: are they used in the loss?")
    return torch.cat(gradients)


def spread(model: nn.Module) -> float:
    """Return the largest difference of any gradient between this rank and rank 0: 0.0 where they are averaged.

    The losses do not show a synchronisation that does nothing, for each rank's own gradient also trains.
    """
    flat = flat_gradients([p for p in model.parameters() if p.requires_grad])  # (P,)
    theirs = flat.clone()
    dist.broadcast(theirs, src=0)
    worst = (flat - theirs).abs().max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()
