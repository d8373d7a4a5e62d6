"""The dispatch mode of a simulated card beside a real host, which simulates only what is fake or for the card."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import arg_tree_leaves, tree_map_only

from ...base.errors import NotAvailable
from ...hardware.gpu import GPU
from ..allocator.caching import Allocator, AllocatorOutOfMemory
from ..allocator.config import AllocatorConfig
from ..devices import GPU_DEVICE
from ..values.known import SMALL, VALUES_LIMIT, is_followed, know, known
from ..values.placeholders import PLACEHOLDER, located, needs_values, warn_of
from .engine import DEVICE_OF, Engine

aten = torch.ops.aten
# Draws that code looks at, and their form with a generator.
DRAWS = {aten.randint.default: aten.randint.generator, aten.randint.low: aten.randint.low_generator,
         aten.randperm.default: aten.randperm.generator}  # fmt: skip


class CardEngine(Engine):
    """The engine of `gpu`, with its caching allocator. `assume`: what every float that is read is, if the user says so.

    `inside`: whether an operator runs, whose fake kernel must see the device that tensors have to torch.
    """

    gpu: GPU
    memory: Allocator
    supports_higher_order_operators = True  # to refuse them by name

    def __init__(self, gpu: GPU, config: AllocatorConfig, assume: float | None = None) -> None:
        super().__init__(GPU_DEVICE, Allocator(gpu.room(), config, gpu.memory), gpu)
        self.assume = assume
        self.follows = VALUES_LIMIT
        self.generator = torch.Generator().manual_seed(0)
        self.inside = False

    @property
    def left(self) -> int:
        """Bytes that the driver has left."""
        assert self.memory.capacity is not None  # no card is without end
        return self.memory.capacity - self.memory.reserved

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is DEVICE_OF:
            return args[0].fake_device
        if isinstance(func, HigherOrderOperator):
            raise located(NotAvailable(
                f"{func.name()} is a kernel that torch.compile makes, which is not simulated; give the block an eager "
                "form of it, as scaled_dot_product_attention, or lab.measure it"
            ))  # fmt: skip
        if self.defers and not self.defers.isdisjoint(types):
            return NotImplemented
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":  # from torch.set_default_device
            kwargs = {**kwargs, "device": GPU_DEVICE}
        if kwargs.get("pin_memory"):  # torch's own code: there is no driver to pin by
            kwargs = {**kwargs, "pin_memory": False}
        tensors = [each for each in arg_tree_leaves(*args, **kwargs) if isinstance(each, Tensor)]
        fake = any(isinstance(each, FakeTensor) for each in tensors)
        if not fake and kwargs.get("device") != GPU_DEVICE:
            with _disable_current_modes():
                return func(*args, **kwargs)
        if self.assume is not None:
            _assume(tensors, self.assume)
        if fake and func._schema.is_mutable and tensors[0] is args[0] and not isinstance(args[0], FakeTensor):
            return _overwrite(func, args[0])
        return self._simulate(func, types, args, kwargs)

    def _simulate(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator for the card; what cannot be simulated raises NotAvailable with the user's line."""
        try:
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
            self.inside = True
            out = super().__torch_dispatch__(func, types, args, kwargs)
            return self._drawn(func, args, out) if func in DRAWS else out
        except NotAvailable as error:
            raise located(error) from None
        except RuntimeError as error:
            if "SparseTensorImpl" in str(error) or "SparseCsrTensorImpl" in str(error):
                message = f"{func} makes or takes a sparse tensor, which is not simulated"
                raise located(NotAvailable(f"{message}; to_dense() it on the host, or lab.measure it")) from None
            if not isinstance(error, UnsupportedOperatorException) and "fake impl" not in str(error):
                raise
            message = f"{func} has no fake kernel; register one with torch.library.register_fake, or lab.measure it"
            raise located(NotAvailable(message)) from error
        finally:
            self.inside = False

    def _as_fake(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor for one on the host, which keeps its values where the engine follows them."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.is_nested:
            raise NotAvailable("nested tensors are not simulated; pad the rows and mask them, or lab.measure it")
        with _disable_current_modes():
            fake = self.fake.from_tensor(tensor.detach())
        if not tensor.is_meta and (is_followed(tensor) or _is_mask(tensor)):
            know(fake, tensor)
        return fake

    def _drawn(self, func: Any, args: tuple, out: Tensor) -> Tensor:
        """Draw token ids and orders for real, from a generator of the card's own: code looks at them."""
        if out.numel() <= VALUES_LIMIT:
            with _disable_current_modes():
                know(out, DRAWS[func](*args, dtype=out.dtype, generator=self.generator))
        return out

    def needs_values(self, func: Any) -> NotAvailable:
        """Return the error for an operator that cannot run without values, with the user's line."""
        return needs_values(func)

    def malloc(self, size: int) -> int:
        """Allocate `size` bytes; raises torch.OutOfMemoryError with torch's message."""
        try:
            return super().malloc(size)
        except AllocatorOutOfMemory as error:
            message = out_of_memory(self.gpu.memory, self.left, error)
        raise torch.OutOfMemoryError(message)  # here, or `error` and its frames would be its context

    def stop(self) -> None:
        """Leave the figures as they are when tensors die later."""
        self._live.clear()


def _assume(tensors: list[Tensor], value: float) -> None:
    """Give the single floats among `tensors` the value that the user said floats have."""
    for each in tensors:
        if each.numel() == 1 and each.is_floating_point() and known(each) is None:
            with _disable_current_modes():
                know(each, torch.full(tuple(each.shape), value, dtype=each.dtype))


def _is_mask(tensor: Tensor) -> bool:
    """Whether floats look like a mask, of which code asks whether it is causal; weights and data do not."""
    if tensor.dim() < 2 or tensor.numel() > VALUES_LIMIT or not tensor.is_floating_point():
        return False
    with _disable_current_modes():
        sample = tensor.flatten()[:: max(1, tensor.numel() // SMALL)].float()
        return bool(((sample == 0) | (sample == 1) | (sample <= torch.finfo(torch.float16).min)).all())


def _overwrite(func: Any, real: Tensor) -> Tensor:
    """Change a real tensor by values that are not known: they become the placeholder."""
    if not real.is_floating_point():
        raise located(NotAvailable(
            f"{func} writes values from the simulated card, which has none, into a {real.dtype} tensor"
        ))  # fmt: skip
    warn_of("a copy to the host")
    with _disable_current_modes():
        return real.fill_(PLACEHOLDER)


def out_of_memory(total: int, left: int, error: AllocatorOutOfMemory) -> str:
    """Return the message of c10/cuda/CUDACachingAllocator.cpp, malloc (torch 2.13), on a card of `total` bytes."""
    return (
        f"CUDA out of memory. Tried to allocate {_size(error.segment)}. GPU 0 has a total capacity of "
        f"{_size(total)} of which {_size(left)} is free. Including non-PyTorch memory, "
        f"this process has {_size(total - left)} memory in use. Of the allocated memory {_size(error.allocated)} is "
        f"allocated by PyTorch, and {_size(error.reserved - error.allocated)} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def _size(size: int) -> str:
    """format_size of c10/cuda/CUDACachingAllocator.cpp."""
    for limit, unit in ((1 << 10, "bytes"), (1 << 20, "KiB"), (1 << 30, "MiB")):
        if size <= limit:
            return f"{size} bytes" if unit == "bytes" else f"{size / (limit >> 10):.2f} {unit}"
    return f"{size / (1 << 30):.2f} GiB"
