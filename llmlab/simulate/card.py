"""The simulated card of `lab.simulator`: which code reaches the engine, and what it is told there."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import arg_tree_leaves, tree_map_only

from ..errors import NotAvailable, SpecError
from ..hardware.gpu import GPU
from ..measure.events import exclusive
from .allocator import Allocator, AllocatorOutOfMemory
from .checkpoints import Checkpoints
from .config import AllocatorConfig
from .cuda_api import cuda_api
from .engine import DEVICE_OF, GPU_DEVICE, INTEGERS, SMALL, VALUES_LIMIT, Engine
from .imports import on_import
from .patches import cuda_operators, fake_parameters, no_end_of_sequence, no_extensions, no_triton
from .process_group import no_deepspeed, without_peers
from .quantized import bitsandbytes_extras, fake_bitsandbytes
from .redirect import Redirect
from .semantics import cuda_extras
from .simulator import PLACEHOLDER
from .sized import known
from .snapshot import History, snapshot
from .streams import nothing, profiled_as_host
from .timeline import Phases
from .values import located, needs_values, warn_of

ENVIRONMENT = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}  # transformers loads weights in this thread
aten = torch.ops.aten
DRAWS = {aten.randint.default: aten.randint.generator, aten.randint.low: aten.randint.low_generator,
         aten.randperm.default: aten.randperm.generator}  # fmt: skip
_open: list[str] = []  # the name of the card in use


class CardEngine(Engine):
    """An engine beside which the host is real: only operators on fake tensors, or for the card, are simulated."""

    card: Card
    assume: float | None = None  # what every float that is read is, if the user says so
    generator: torch.Generator
    inside = False  # an operator, whose fake kernel sees the device that tensors have
    supports_higher_order_operators = True  # to refuse them by name

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
        tensors = [each for each in arg_tree_leaves(*args, **kwargs) if isinstance(each, Tensor)]
        fake = any(isinstance(each, FakeTensor) for each in tensors)
        if not fake and kwargs.get("device") != GPU_DEVICE:
            with _disable_current_modes():
                return func(*args, **kwargs)
        if self.assume is not None:
            self._assume(tensors)
        try:
            if fake and func._schema.is_mutable and tensors[0] is args[0] and not isinstance(args[0], FakeTensor):
                return _overwrite(func, args[0])
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
            self.inside = True
            out = super().__torch_dispatch__(func, types, args, kwargs)
            return self._drawn(func, args, out) if func in DRAWS else out
        except NotAvailable as error:
            raise located(error) from None
        except (UnsupportedOperatorException, RuntimeError) as error:
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
        with _disable_current_modes():
            fake = self.fake.from_tensor(tensor.detach())
        if not tensor.is_meta and (tensor.dtype in INTEGERS or tensor.numel() <= SMALL or _is_mask(tensor)):
            fake.simulated_value = tensor
        return fake

    def _drawn(self, func: Any, args: tuple, out: Tensor) -> Tensor:
        """Draw token ids and orders for real, from a generator of the card's own: code looks at them."""
        if out.numel() <= VALUES_LIMIT:
            with _disable_current_modes():
                out.simulated_value = DRAWS[func](*args, dtype=out.dtype, generator=self.generator)
        return out

    def _assume(self, tensors: list[Tensor]) -> None:
        """Give the single floats among `tensors` the value that the user said floats have."""
        for each in tensors:
            if each.numel() == 1 and each.is_floating_point() and known(each) is None:
                with _disable_current_modes():
                    each.simulated_value = torch.full(tuple(each.shape), self.assume, dtype=each.dtype)

    def needs_values(self, func: Any) -> NotAvailable:
        """Return the error for an operator that cannot run without values, with the user's line."""
        return needs_values(func)

    def malloc(self, size: int) -> int:
        """Allocate `size` bytes; raises torch.OutOfMemoryError with torch's message."""
        try:
            return super().malloc(size)
        except AllocatorOutOfMemory as error:
            message = self.card.out_of_memory(error)
        raise torch.OutOfMemoryError(message)  # here, or `error` and its frames would be its context

    def stop(self) -> None:
        """Leave the figures as they are when tensors die later."""
        self._live.clear()


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
        raise NotAvailable(f"{func} writes values from the simulated card, which has none, into a {real.dtype} tensor")
    warn_of("a copy to the host")
    with _disable_current_modes():
        return real.fill_(PLACEHOLDER)


class Card:
    """One simulated card with its allocator, and the block in which it is there."""

    def __init__(self, gpu: GPU, config: AllocatorConfig, assume: float | None = None) -> None:
        self.gpu = gpu
        self.hidden = False  # from libraries that would load a driver
        self.memory = Allocator(gpu.room(), config, gpu.memory)
        self.engine = CardEngine(GPU_DEVICE, self.memory, cuda_extras(gpu), gpu.cublas_workspace)
        self.engine.card, self.engine.assume, self.engine.follows = self, assume, VALUES_LIMIT
        self.phases = Phases(self.engine)
        self.history = History(self.phases.place)
        self.memory.on_event = self.history.record
        self.engine.generator = torch.Generator().manual_seed(0)
        self.checkpoints = Checkpoints(self.engine)
        self._thread = threading.get_ident()
        self._real: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id: a real parameter, and its fake
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []

    @property
    def free(self) -> int:
        """Bytes that the driver has left: what mem_get_info shows."""
        return self.memory.capacity - self.memory.reserved

    def snapshot(self) -> dict[str, Any]:
        """Return what torch.cuda.memory._snapshot returns."""
        return snapshot(self.memory, self.history)

    def out_of_memory(self, error: AllocatorOutOfMemory) -> str:
        """Return the message of c10/cuda/CUDACachingAllocator.cpp, malloc (torch 2.13)."""
        used = self.gpu.memory - self.memory.capacity + error.reserved
        return (
            f"CUDA out of memory. Tried to allocate {_size(error.segment)}. GPU 0 has a total capacity of "
            f"{_size(self.gpu.memory)} of which {_size(self.gpu.memory - used)} is free. Including non-PyTorch memory, "
            f"this process has {_size(used)} memory in use. Of the allocated memory {_size(error.allocated)} is "
            f"allocated by PyTorch, and {_size(error.reserved - error.allocated)} is reserved by PyTorch but "
            "unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
            "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )

    @contextmanager
    def plugged_in(self, world_size: int | None = None) -> Iterator[None]:
        """Let this thread have the card, as one rank of `world_size`.

        Raises SpecError where there is one already, in this thread or another.
        """
        if _open:
            raise SpecError(f"a simulator of {_open[0]} is open; one at a time, in one thread: end its block first")
        gc.collect()  # what dies later must not be freed at a moment that depends on earlier code
        with exclusive("simulator()"), ExitStack() as stack:
            _open.append(self.gpu.name)
            stack.callback(_open.clear)
            stack.enter_context(fake_parameters())
            stack.enter_context(cuda_operators(self.gpu.compute_capability))
            stack.enter_context(self._fake_parameters())
            stack.enter_context(cuda_api(self))
            stack.enter_context(profiled_as_host())
            redirect = Redirect(self.engine, self.engine.assume)
            stack.enter_context(redirect.patched())
            stack.enter_context(self.checkpoints.patched())
            stack.enter_context(_default_device())
            stack.enter_context(mock.patch.dict(os.environ, ENVIRONMENT))
            stack.callback(self.engine.stop)
            stack.enter_context(self.engine)
            stack.enter_context(redirect)
            stack.enter_context(_accelerate_state())
            _forget_devices()
            stack.callback(_forget_devices)
            stack.enter_context(on_import(self._library_patches(stack), self._hide))
            stack.enter_context(without_peers(self.engine, world_size))
            stack.enter_context(self.phases.watched())
            yield

    def _library_patches(self, stack: ExitStack) -> dict[str, Callable[[], None]]:
        """Return what to change in libraries, by their module's name, once it is there."""

        def put(module: str, name: str, function: Callable) -> None:
            stack.enter_context(mock.patch.object(sys.modules[module], name, function))

        def bitsandbytes() -> None:
            stack.enter_context(fake_bitsandbytes(None))
            self.engine.extras |= bitsandbytes_extras(self.gpu)
            for name, function in {"get_paged": self._paged, "fill": nothing, "prefetch_tensor": nothing}.items():
                put("bitsandbytes.functional", name, function)

        return {
            "bitsandbytes": bitsandbytes,
            "deepspeed": lambda: put("deepspeed", "initialize", no_deepspeed),
            "triton.runtime.jit": lambda: stack.enter_context(no_triton()),
            "torch.utils.cpp_extension": lambda: stack.enter_context(no_extensions()),
            "safetensors.torch": lambda: stack.enter_context(self.checkpoints.safetensors()),
            "transformers.generation.stopping_criteria": lambda: stack.enter_context(no_end_of_sequence()),
        }

    def _paged(self, *shape: int, dtype: torch.dtype = torch.float32, **device: Any) -> Tensor:
        """bitsandbytes.functional.get_paged: unified memory, which is none of the allocator's."""
        with _disable_current_modes(), self.engine.fake:
            made = torch.zeros(shape, dtype=dtype, device=GPU_DEVICE)
        self.engine.hold_at(made, 0)
        made.is_paged, made.page_deviceid = True, 0
        return made

    @contextmanager
    def _hide(self) -> Iterator[None]:
        before, self.hidden = self.hidden, True
        try:
            yield
        finally:
            self.hidden = before

    @contextmanager
    def _fake_parameters(self) -> Iterator[None]:
        """Make parameters fake when they are made; those made before the block when their module moves."""
        real_new, apply = nn.Parameter.__new__, nn.Module._apply

        def new(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> Tensor:
            if cls is nn.Parameter and type(data) is Tensor and data.device.type == "cpu" and self._simulates():
                data = self._fake(data)
            return real_new(cls, data, requires_grad)

        def apply_to_fake(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
            if recurse:
                self._replace_parameters(module)
            return apply(module, fn, recurse)

        with (
            mock.patch.object(nn.Parameter, "__new__", new),
            mock.patch.object(nn.Module, "_apply", apply_to_fake),
        ):
            try:
                yield
            finally:
                for module, name, parameter in self._replaced:
                    module._parameters[name] = parameter

    def _simulates(self) -> bool:
        """Whether a parameter that is made now is simulated: not in a second thread, nor in a file that is read."""
        return not self.checkpoints.plain and threading.get_ident() == self._thread

    def _fake(self, data: Tensor) -> Tensor:
        with _disable_current_modes(), self.engine.fake:
            return torch.empty_strided(data.size(), data.stride(), dtype=data.dtype, device="cpu")

    def move(self, module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` to the module's own parameters and buffers, as Module.to does to those of all modules in it."""
        self._replace_parameters(module)
        module._apply(fn, False)

    def _replace_parameters(self, module: nn.Module) -> None:
        """Put one fake parameter in the place of each real one, in all modules that share it."""
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if type(parameter) is not nn.Parameter or parameter.is_meta:
                    continue
                if id(parameter) not in self._real:
                    fake = nn.Parameter(self._fake(parameter.data), parameter.requires_grad)
                    self._real[id(parameter)] = parameter, fake
                each._parameters[name] = self._real[id(parameter)][1]
                self._replaced.append((each, name, parameter))


@contextmanager
def _default_device() -> Iterator[None]:
    """Undo torch.set_default_device."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    try:
        yield
    finally:
        if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not context:
            torch.set_default_device(context.device if context else None)


@contextmanager
def _accelerate_state() -> Iterator[None]:
    """Let accelerate look for its devices anew, here and after the block."""
    state = sys.modules.get("accelerate.state")
    singletons = [state.PartialState._shared_state, state.AcceleratorState._shared_state] if state else []
    kept = [dict(each) for each in singletons]
    for each in singletons:
        each.clear()
    try:
        yield
    finally:
        if state is None and (state := sys.modules.get("accelerate.state")):
            singletons = [state.PartialState._shared_state, state.AcceleratorState._shared_state]
            kept = [{}, {}]
        for each, before in zip(singletons, kept, strict=True):
            each.clear()
            each.update(before)


def _forget_devices() -> None:
    """Forget what transformers remembers about this machine."""
    checks = sys.modules.get("transformers.utils.import_utils")
    for name, check in vars(checks).items() if checks else ():
        if name.startswith("is_") and hasattr(check, "cache_clear"):
            check.cache_clear()


def _size(size: int) -> str:
    """format_size of c10/cuda/CUDACachingAllocator.cpp."""
    for limit, unit in ((1 << 10, "bytes"), (1 << 20, "KiB"), (1 << 30, "MiB")):
        if size <= limit:
            return f"{size} bytes" if unit == "bytes" else f"{size / (limit >> 10):.2f} {unit}"
    return f"{size / (1 << 30):.2f} GiB"
