"""Optimizer offloading from scratch (ZeRO-Offload): the host stores the optimizer states and runs the update.

Bytes per parameter in mixed precision, and when they are copied (Ren et al., arXiv 2101.06840, section 4):

    backward   2 of gradient      device -> host   as soon as a gradient is complete
    update     12 of states       stay in the host's memory, or in files (ZeRO-Infinity, arXiv 2104.07857)
    update     2 of new weights   host -> device   while the CPU updates the next bucket

    n  elements of a bucket
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import SpecError
from .data_parallel import buckets

BUCKET_BYTES = 64 * 2**20  # of the weights that are updated and copied together
Memory = Callable[[int], Tensor]  # allocates this many fp32 zeros outside of the device


def in_ram(n: int) -> Tensor:
    """Return n fp32 zeros, (n,), in the host's memory."""
    return torch.zeros(n, device="cpu")


class InFiles:
    """Allocates fp32 tensors, (n,), in memory-mapped files: the system reads and writes their pages on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[Path] = []

    def __call__(self, n: int) -> Tensor:
        self.paths.append(self.folder / f"{len(self.paths)}.fp32")
        return torch.from_file(str(self.paths[-1]), shared=True, size=n, dtype=torch.float32)  # a new file is zeros


class Bucket:
    """Parameters that are copied together. The host stores their master weights, their moments and a flat buffer."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: type, memory: Memory, options: dict) -> None:
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.device = parameters[0].device
        on_gpu = self.device.type == "cuda"
        # Gradients arrive in this buffer, and new weights leave from it. It is pinned, so that copies can overlap.
        self.staging = torch.empty(sum(sizes), dtype=parameters[0].dtype, device="cpu", pin_memory=on_gpu)  # (n,)
        self.views = dict(zip(parameters, self.staging.split(sizes), strict=True))
        self.master = nn.Parameter(memory(sum(sizes)))  # (n,)
        for p, view in zip(parameters, self.master.detach().split(sizes), strict=True):
            view.copy_(p.detach().flatten())
        self.optimizer = optimizer([self.master], **options)
        if memory is not in_ram:  # otherwise the optimizer creates its moments in its first step
            moments = {name: memory(sum(sizes)) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[self.master] = {"step": torch.tensor(0.0, device="cpu"), **moments}
        self.arrived: set[nn.Parameter] = set()  # parameters whose gradients are in the buffer
        self.copied = torch.cuda.Event() if on_gpu else None

    def send(self, parameter: nn.Parameter, stream: Any) -> int:
        """Start to copy the gradient to the host, free it on the device, and return its bytes."""
        if parameter in self.arrived:  # the gradient of the previous micro-batch is still in the buffer
            self.add_gradients()
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # the hook runs when it is complete
        with on_stream(stream):
            self.views[parameter].copy_(gradient.flatten(), non_blocking=True)
        self.arrived.add(parameter)
        if self.copied:
            gradient.record_stream(stream)  # its memory is not reused before the copy is complete
            self.copied.record(stream)
        return gradient.nbytes

    def add_gradients(self) -> None:
        """Add the gradients in the buffer to the fp32 gradient of the master weights."""
        if self.copied:
            self.copied.synchronize()
        for parameter in set(self.parameters) - self.arrived:  # the backward pass did not reach it
            self.views[parameter].zero_()
        if self.master.grad is None:
            self.master.grad = self.staging.to(torch.float32, copy=True)  # (n,)
        else:
            self.master.grad.add_(self.staging)
        self.arrived = set()

    def step(self) -> None:
        """Update the master weights on the host, and round them into the buffer."""
        if self.arrived:
            self.add_gradients()
        self.optimizer.step()
        self.master.grad = None
        self.staging.copy_(self.master.detach())

    @torch.no_grad()
    def return_weights(self, stream: Any) -> None:
        """Start to copy the new weights to the device."""
        with on_stream(stream):
            for parameter, view in self.views.items():
                parameter.copy_(view.view_as(parameter), non_blocking=True)


class Offloaded:
    """Optimizer for a model on a device whose master weights and moments are elsewhere. Call `step()` after backward.

    Gradients leave the device as soon as they are complete; those of several micro-batches are summed on the host.
    `optimizer` must treat all elements alike, as AdamW does. `moved` counts the bytes copied to and from the host.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: type = torch.optim.AdamW,
        bucket_bytes: int = BUCKET_BYTES,
        memory: Memory = in_ram,
        **options: Any,
    ) -> None:
        trained = [p for p in parameters if p.requires_grad]
        if bucket_bytes < 1 or not trained:
            given = f"bucket_bytes={bucket_bytes} for {len(trained)} parameters"
            raise SpecError(f"{given}; give a size >= 1 and at least one parameter that requires a gradient")
        groups = buckets(trained[::-1], bucket_bytes)
        self.buckets = [Bucket(group, optimizer, memory, options) for group in groups]
        self.stream = torch.cuda.Stream() if trained[0].device.type == "cuda" else None
        self.moved = {"to host": 0, "from host": 0}
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda p, bucket=bucket: self._complete(bucket, p))

    def _complete(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        self.moved["to host"] += bucket.send(parameter, self.stream)

    def step(self) -> None:
        """Update one bucket after the other. The new weights of each are copied while the CPU updates the next."""
        for bucket in self.buckets:
            bucket.step()
            bucket.return_weights(self.stream)
            self.moved["from host"] += bucket.staging.nbytes
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Run the `with` block on `stream`, after all work queued so far, and concurrently with the work queued later."""
    if stream is None:  # no GPU, no streams
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
