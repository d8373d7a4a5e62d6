"""Optimizer offloading from scratch (ZeRO-Offload): gradients go to the host, Adam runs there, weights come back.

    python -m llmlab.course.experiments offload --engine scratch --steps 20 --json

What is copied, and when (Ren et al., arXiv 2101.06840, section 4), per parameter in mixed precision:

    backward   gradient, 2 bytes     device -> host   during the rest of backward
    update     12 bytes of state     stay on the host, or on a drive (ZeRO-Infinity, arXiv 2104.07857)
    update     weight, 2 bytes       host -> device   during the update of the next bucket

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

BUCKET_BYTES = 64 * 2**20  # of weights that are updated, and copied, together
Memory = Callable[[int], Tensor]  # allocates fp32 zeros for a number of elements, outside the device


def in_ram(n: int) -> Tensor:
    """Return n fp32 zeros, (n,), in the host's memory."""
    return torch.zeros(n, device="cpu")


class InFiles:
    """Allocates fp32 tensors, (n,), in memory-mapped files: the system reads and writes pages as they are used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[Path] = []

    def __call__(self, n: int) -> Tensor:
        self.paths.append(self.folder / f"{len(self.paths)}.fp32")
        return torch.from_file(str(self.paths[-1]), shared=True, size=n, dtype=torch.float32)  # a new file is zeros


class Bucket:
    """Parameters that are copied together, with one flat buffer, the fp32 master copy and the moments on the host."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: type, memory: Memory, options: dict) -> None:
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.device = parameters[0].device
        on_gpu = self.device.type == "cuda"
        # A pinned buffer, so that copies run beside the CPU: gradients arrive in it, and new weights leave from it.
        self.staging = torch.empty(sum(sizes), dtype=parameters[0].dtype, device="cpu", pin_memory=on_gpu)  # (n,)
        self.views = dict(zip(parameters, self.staging.split(sizes), strict=True))
        self.master = nn.Parameter(memory(sum(sizes)))  # (n,)
        for p, view in zip(parameters, self.master.detach().split(sizes), strict=True):
            view.copy_(p.detach().flatten())
        self.optimizer = optimizer([self.master], **options)
        if memory is not in_ram:  # otherwise the optimizer creates them in its first step
            moments = {name: memory(sum(sizes)) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[self.master] = {"step": torch.tensor(0.0, device="cpu"), **moments}
        self.arrived: set[nn.Parameter] = set()  # parameters whose gradients are in the buffer
        self.copied = torch.cuda.Event() if on_gpu else None

    def send(self, parameter: nn.Parameter, stream: Any) -> int:
        """Start to copy the gradient to the host, free it on the device, and return its bytes."""
        if parameter in self.arrived:  # the previous micro-batch's gradient is still in the buffer
            self.sum_up()
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # it was just accumulated
        with beside(stream):
            self.views[parameter].copy_(gradient.flatten(), non_blocking=True)
        self.arrived.add(parameter)
        if self.copied:
            gradient.record_stream(stream)  # its memory is not reused before the copy is done
            self.copied.record(stream)
        return gradient.nbytes

    def sum_up(self) -> None:
        """Add the gradients in the buffer to the gradient of the master copy."""
        if self.copied:
            self.copied.synchronize()
        for parameter in set(self.parameters) - self.arrived:  # backward did not reach it
            self.views[parameter].zero_()
        gradient = self.staging.to(torch.float32, copy=True)  # (n,)
        self.master.grad = gradient if self.master.grad is None else self.master.grad.add_(gradient)
        self.arrived = set()

    def step(self) -> None:
        """Update the master copy on the host, and round it into the buffer."""
        if self.arrived:
            self.sum_up()
        self.optimizer.step()
        self.master.grad = None
        self.staging.copy_(self.master.detach())

    @torch.no_grad()
    def give_back(self, stream: Any) -> None:
        """Start to copy the new weights to the device."""
        with beside(stream):
            for parameter, view in self.views.items():
                parameter.copy_(view.view_as(parameter), non_blocking=True)


class Offloaded:
    """Optimizer for a model on a device, with the fp32 master copy and states elsewhere; call `step()` after backward.

    Gradients leave the device as backward computes them; those of several micro-batches are summed on the host.
    `optimizer` must treat every element alike (AdamW does). `moved`: bytes copied to and from the host so far.
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
                parameter.register_post_accumulate_grad_hook(lambda p, bucket=bucket: self._ready(bucket, p))

    def _ready(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        self.moved["to host"] += bucket.send(parameter, self.stream)

    def step(self) -> None:
        """Update bucket by bucket, in the order of backward; each is copied back while the CPU updates the next."""
        for bucket in self.buckets:
            bucket.step()
            bucket.give_back(self.stream)
            self.moved["from host"] += bucket.staging.nbytes
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)


@contextmanager
def beside(stream: Any) -> Iterator[None]:
    """Run the `with` block on `stream`: after the work queued so far, and beside the work queued later."""
    if stream is None:  # no GPU, no streams
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
