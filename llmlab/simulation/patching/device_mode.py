"""A torch function mode that maps the device "cuda" to the simulated GPU, and refuses to read unknown values."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...base.compat import (
    GLOBAL_DEVICE_CONTEXT,
    DisableTorchFunction,
    FakeTensor,
    disable_current_modes,
    parse_to,
    symbol,
)
from .. import FOLDER
from ..devices import GPU_DEVICE, HOST, Shown
from ..engine.engine import Engine
from ..engine.real_host import RealHost
from ..values.known import VALUES_LIMIT, forget, know, known
from ..values.placeholders import (
    PLACEHOLDER,
    Unknown,
    Whole,
    asked_by_torch,
    decided,
    format_unknown,
    initializing,
    refuse,
    value_for,
    warn_of,
    whole,
)
from .cuda_api import check_index
from .dtensors import of_dtensors
from .patches import made_on_gpu, on_gpu, set_data
from .tensor_types import legacy_type

FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
# Functions for which a whole number is an operand, not a size.
TAKE_NUMBERS = frozenset((
    "add", "and", "clamp", "div", "eq", "fill", "floor_divide", "floordiv", "full", "full_like", "ge", "get", "gt",
    "iadd", "idiv", "imul", "isub", "itruediv", "le", "lt", "manual_seed", "masked_fill", "mod", "mul", "ne", "or",
    "pow", "radd", "rdiv", "remainder", "rfloordiv", "rmul", "rpow", "rsub", "rtruediv", "sub", "truediv", "where",
))  # fmt: skip
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)  # dtypes of scalars that can index
TORCH = os.path.dirname(torch.__file__)
WITHOUT_FRAMES = (FOLDER, os.path.join(TORCH, "_dynamo"), os.path.join(TORCH, "_compile.py"))
# Modules of torch that read a tensor's device type and expect CUDA.
SEES_CARD = (
    "torch.amp.autocast_mode", "torch.nn.attention.flex_attention", "torch.nn.modules.batchnorm",
    "torch.nn.parallel.data_parallel",
    # FSDP1 compares the devices of tensors with the device it was given.
    *(
        f"torch.distributed.fsdp.{name}"
        for name in (
            "_common_utils", "_flat_param", "_init_utils", "_limiter_utils", "_optim_utils", "_runtime_utils",
            "_state_dict_utils", "_unshard_param_utils", "fully_sharded_data_parallel", "sharded_grad_scaler",
        )
    ),
)  # fmt: skip


class Redirect(TorchFunctionMode):
    """Maps "cuda" to the engine's device, and reports the engine's tensors as being on `Shown.device`."""

    def __init__(self, engine: Engine, host: RealHost) -> None:
        super().__init__()
        self.engine, self.host, self.assume = engine, host, host.assume
        tensor_type: Any = Tensor  # a function mode sees properties as their getters and setters
        self.special: dict[Any, Callable[..., Any]] = {
            Tensor.cuda: self._cuda,
            Tensor.pin_memory: self._pin_memory,
            Tensor.is_pinned: lambda tensor, *device: getattr(tensor, "simulated_pin", False),
            tensor_type.is_cuda.__get__: lambda tensor: on_gpu(tensor),
            tensor_type.is_cpu.__get__: lambda tensor: not on_gpu(tensor) and tensor.device.type == "cpu",
            Tensor.get_device: lambda tensor: Shown.device.index if on_gpu(tensor) else -1,
            Tensor.new_tensor: _new_tensor,
            Tensor.type: _type,
            Tensor.item: self._item,
            Tensor.__bool__: self._read(Tensor.__bool__, lambda number: decided("bool()", bool(number))),
            Tensor.__int__: self._read(Tensor.__int__, lambda number: whole("int()", number)),
            Tensor.__index__: self._read(Tensor.__index__, lambda number: whole("an index", number)),
            Tensor.__float__: self._float,
            Tensor.numpy: self._numpy,
            Tensor.__array__: lambda tensor, dtype=None: self._numpy(tensor),
            Tensor.tolist: self._list,
            Tensor.__repr__: _repr,
            Tensor.__format__: self._format,
            Tensor.data_ptr: self._address,
            Tensor.__deepcopy__: _deepcopy,
            tensor_type.data.__set__: set_data,
            Tensor.__dlpack__: _handed_out("Tensor.__dlpack__"),
            tensor_type.__cuda_array_interface__.__get__: _handed_out("Tensor.__cuda_array_interface__"),
        }
        for function in (torch.isnan, torch.isinf, torch.isposinf, torch.isneginf, torch.isfinite, torch.isclose):
            for owner in (function, getattr(Tensor, function.__name__)):
                self.special[owner] = _finite(owner, function in (torch.isfinite, torch.isclose))
        for compared in (torch.equal, torch.allclose, Tensor.equal, Tensor.allclose):
            self.special[compared] = _equal(compared)
        for name in ("gt", "lt", "ge", "le", "eq", "ne"):
            for compared in (getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"__{name}__")):
                self.special[compared] = self._comparison(compared)
        self.of_dtensors = {**of_dtensors(self.special), tensor_type.device.__get__: self._device}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func("cuda", *args) if args and type(args[0]) is int else func(*args, **kwargs)
        special = self.special.get(func)
        if special is not None and (func in UNIVERSAL or isinstance(args[0], FakeTensor)):
            return special(*args, **kwargs)
        if args and type(args[0]) in self.engine.defers and (of_dtensor := self.of_dtensors.get(func)) is not None:
            return of_dtensor(*args, **kwargs)
        args = tuple(map(_redirected, args))
        if kwargs:
            pinned = kwargs.get("pin_memory")
            kwargs = {name: _redirected(value) for name, value in kwargs.items() if name != "pin_memory"}
            if type(kwargs.get("device")) is int:
                check_index(kwargs["device"])
                kwargs["device"] = GPU_DEVICE
            if pinned:
                return self._pinned(func(*args, **kwargs))
        if func is Tensor.to and len(args) > 1 and type(args[1]) is int:
            check_index(args[1])
            args = (args[0], GPU_DEVICE, *args[2:])
        if func is parse_to and args and type(args[0]) is int:  # Module.to(0)
            check_index(args[0])
            args = (GPU_DEVICE, *args[1:])
        if func is torch.tensor and kwargs.get("device") is None and _default_is_cuda():
            kwargs["device"] = GPU_DEVICE
        if (func in FROM_DATA or func is Tensor.__setitem__) and _holds_unknown(args[-1]):
            warn_of("a tensor made on the host from .item()")
        if func in FROM_DATA:
            if args and type(args[0]) in (list, tuple):
                args = (self._numbers(args[0]), *args[1:])
            if kwargs.get("device") == GPU_DEVICE:
                tensor = made_on_gpu(func, *args, **kwargs)
                if _holds_unknown(args[0]):
                    forget(tensor)
                return tensor
        elif func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _picked(args[1]), *args[2:])
        elif _sized_by_unknown(func, args, kwargs):
            raise refuse(f"{func.__name__}()", "takes a whole number from a value, which may become a size")
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            del args, kwargs
            _forget_frames(error)
            raise
        except TypeError as error:
            if Unknown.__name__ in str(error):  # torch refused a size
                raise refuse(f"{func.__name__}()", "takes a size from a value") from None
            raise

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Show `Shown.device` to code outside torch, keep the mode on in backward passes, and give storages
        addresses."""
        real_device: Any = FakeTensor.device  # a property
        run_backward = symbol("torch.autograd._engine_run_backward")
        real_default, real_pointer = torch.get_default_device, torch.UntypedStorage.data_ptr

        def device(tensor: FakeTensor) -> torch.device:
            return self._shown(real_device.fget(tensor), sys._getframe(1).f_globals.get("__name__", ""))

        def backward(*args: Any, **kwargs: Any) -> Any:
            with self:  # checkpointing recomputes code that names "cuda"
                return run_backward(*args, **kwargs)

        def default_device() -> torch.device:
            device = real_default()
            return Shown.device if device == GPU_DEVICE else device

        def pointer(storage: torch.UntypedStorage) -> int:
            address = self.engine.storage_address(storage)
            if address is not None:
                return address
            return storage._cdata if storage.device.type == "meta" else real_pointer(storage)

        real_wrapper = Tensor._make_wrapper_subclass

        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            """For subclasses such as those of torchao, which pass the device of their inner tensor."""
            if "device" in kwargs:
                kwargs["device"] = _redirected(kwargs["device"])
            return real_wrapper(*args, **kwargs)

        real_dlpack, refused = torch.to_dlpack, _handed_out("torch.to_dlpack")
        dlpack = lambda tensor: (refused if isinstance(tensor, FakeTensor) else real_dlpack)(tensor)  # noqa: E731

        with ExitStack() as stack:
            for module in (torch, torch.utils.dlpack):
                stack.enter_context(mock.patch.object(module, "to_dlpack", dlpack))
            stack.enter_context(mock.patch.object(FakeTensor, "device", property(device, real_device.fset)))
            stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: self._list(tensor)))
            stack.enter_context(mock.patch.object(Tensor, "_make_wrapper_subclass", staticmethod(wrapper)))
            stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", backward))
            stack.enter_context(mock.patch.object(torch, "get_default_device", default_device))
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", pointer))
            yield

    def _shown(self, device: torch.device, asking: str) -> torch.device:
        """Return the device that code in the module `asking` sees for a tensor on `device`."""
        if device != GPU_DEVICE or self.host.inside:
            return device
        inside = asking.startswith(("torch.", "llmlab.simulation.")) or asking == "torch"
        return device if inside and asking not in SEES_CARD else Shown.device

    def _device(self, dtensor: Tensor) -> torch.device:
        return self._shown(dtensor.device, sys._getframe(2).f_globals.get("__name__", ""))

    def _cuda(self, tensor: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        check_index(device)
        if type(tensor) in (Tensor, FakeTensor):
            return tensor.to(GPU_DEVICE, non_blocking=non_blocking)
        with self:  # a subclass with a `to` of its own, which may name "cuda"
            return tensor.to(Shown.device, non_blocking=non_blocking)

    def _pin_memory(self, tensor: Tensor, *device: Any) -> Tensor:
        if on_gpu(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return self._pinned(tensor.clone())

    def _pinned(self, tensor: Any) -> Tensor:
        tensor.simulated_pin = True
        self.engine.on_host.pin(tensor)
        return tensor

    # ---- values

    def _numbers(self, data: Any) -> Any:
        """Return nested lists in which GPU tensors of one element are replaced by numbers, as torch reads them."""
        if type(data) in (list, tuple):
            return [self._numbers(item) for item in data]
        return self._item(data) if isinstance(data, FakeTensor) and data.numel() == 1 else data

    def _item(self, tensor: Tensor) -> Any:
        if known(tensor) is not None:
            return self.engine.read(tensor)
        if tensor.numel() != 1:
            raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
        value = value_for(tensor.dtype, self.assume)
        # Optimizers of torch read norms to clip and scale by; the memory does not depend on them.
        if self.assume is not None or asked_by_torch().startswith("torch.optim."):
            return value
        return Unknown(value)

    def _float(self, tensor: Tensor) -> float:
        read = self._item(tensor)
        if type(read) is Unknown:
            warn_of("float()")
        return float.__add__(float(read) if type(read) is not Unknown else PLACEHOLDER, 0.0)

    def _comparison(self, function: Callable) -> Callable:
        """Return a comparison in which the placeholder replaces a single number that is unknown."""

        def stand_in(value: Any) -> Any:
            if not isinstance(value, FakeTensor):
                return value
            number = known(value)
            return number if number is not None else torch.tensor(value_for(value.dtype, self.assume), device=HOST)

        def compare(tensor: Tensor, other: Any) -> Tensor:
            out = function(tensor, other)
            if isinstance(out, FakeTensor) and out.numel() == 1 and known(out) is None:
                warn_of("a comparison")
                with disable_current_modes(), DisableTorchFunction():
                    know(out, function(stand_in(tensor), stand_in(other)).reshape(out.shape))
            return out

        return compare

    def _format(self, tensor: Tensor, spec: str) -> str:
        return format(_repr(tensor), spec) if tensor.dim() else format(self._item(tensor), spec)

    def _read(self, function: Callable, stand_in: Callable[[Any], Any]) -> Callable:
        def read(tensor: Tensor) -> Any:
            if known(tensor) is not None:
                return function(torch.tensor(self.engine.read(tensor)))
            if initializing():  # comes before `assume`, with which initialization would redraw for ever
                return function(torch.full(tuple(tensor.shape), False))
            number = value_for(tensor.dtype, self.assume)
            if tensor.numel() != 1 or self.assume is not None:
                return function(torch.full(tuple(tensor.shape), number))  # several elements raise torch's error
            return stand_in(number)

        return read

    def _values(self, tensor: Tensor, asking: str) -> Tensor:
        """Return a real tensor that holds the values if they are known, else the placeholder."""
        value = known(tensor)
        if value is not None:
            return value
        if self.assume is None:
            warn_of(asking)
        return torch.full(tuple(tensor.shape), value_for(tensor.dtype, self.assume), dtype=tensor.dtype, device="cpu")

    def _list(self, tensor: Tensor) -> Any:
        if known(tensor) is None and self.assume is None and tensor.dtype != torch.bool and not tensor.is_complex():
            if tensor.is_floating_point():
                return _nested(tuple(tensor.shape), Unknown(PLACEHOLDER))
            warn_of("Tensor.tolist")
            return _nested(tuple(tensor.shape), Whole(0))
        return self._values(tensor, "Tensor.tolist").tolist()

    def _numpy(self, tensor: Tensor, *, force: bool = False) -> Any:
        if on_gpu(tensor) and not force:
            raise TypeError(
                f"can't convert {Shown.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if tensor.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._values(tensor, "Tensor.numpy").numpy()

    def _address(self, tensor: Tensor) -> int:
        """Return the address of the tensor in simulated memory, because libraries compare addresses."""
        if sys._getframe(2).f_globals.get("__name__", "").startswith("bitsandbytes"):
            raise refuse("Tensor.data_ptr", "is what a compiled kernel asks for")
        return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch reads it, and it is 0
        return Tensor.__deepcopy__(tensor, memo)


def _handed_out(name: str) -> Callable:
    def refused(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        raise refuse(name, "gives GPU memory to another library")

    return refused


def _nested(shape: tuple[int, ...], value: Any) -> Any:
    return [_nested(shape[1:], value) for _ in range(shape[0])] if shape else value


def _finite(function: Callable, finite: bool) -> Callable:
    """isnan and similar functions: we assume that results are finite, and for isclose that two results agree."""

    def answer(*args: Any, **kwargs: Any) -> Tensor:
        out = function(*args, **kwargs)
        if known(out) is None and out.numel() <= VALUES_LIMIT:
            with disable_current_modes():
                know(out, torch.full(tuple(out.shape), finite))
        return out

    return answer


def _equal(function: Callable) -> Callable:
    """torch.equal and allclose: unknown values are assumed to be equal, because such code checks that results agree."""

    def answer(first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> bool:
        if known(first) is not None and known(second) is not None:
            return function(first, second, *args, **kwargs)
        warn_of(f"torch.{function.__name__}()")
        return first.shape == second.shape

    return answer


def _redirected(value: Any) -> Any:
    """Return the engine's device for "cuda" and torch.device("cuda"), and any other value unchanged."""
    if isinstance(value, torch.device):
        if value.type == "cuda":
            check_index(value)
            return GPU_DEVICE
    elif type(value) is str and (value == "cuda" or value.startswith("cuda:")):
        check_index(value)
        return GPU_DEVICE
    return value


def _picked(index: Any) -> Any:
    """Return the index with 0 for each whole number that the GPU computed; the resulting shape is the same."""
    if isinstance(index, tuple):
        return tuple(map(_picked, index))
    if isinstance(index, slice):
        if any(type(bound) in (Unknown, Whole) for bound in (index.start, index.stop, index.step)):
            raise refuse("a slice", "takes a size from a value")
    elif isinstance(index, FakeTensor) and index.dtype in WHOLE and not index.dim() and known(index) is None:
        warn_of("an index")
        return 0
    return index


def _sized_by_unknown(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether `func` may use a whole number that the GPU computed as a size."""
    values = [*args, *kwargs.values()]
    if any(type(arg) is Whole for arg in values) and getattr(func, "__name__", "").strip("_") not in TAKE_NUMBERS:
        return True
    return any(type(item) is Whole for arg in values if type(arg) in (list, tuple) for item in arg)


def _forget_frames(error: torch.OutOfMemoryError) -> None:
    """Remove our frames, and those of torch around a dispatch mode, from the traceback.

    Through these frames, code that catches the error would keep the operator's arguments alive; kernels of CUDA have no
    such frames.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        if frame.tb_next.tb_frame.f_code.co_filename.startswith(WITHOUT_FRAMES):
            frame.tb_next = frame.tb_next.tb_next
        else:
            frame = frame.tb_next


def _holds_unknown(data: Any) -> bool:
    return any(type(item) is Unknown for item in (data if isinstance(data, (list, tuple)) else (data,)))


def _default_is_cuda() -> bool:
    context = getattr(GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context is not None and context.device.type == "cuda"


def _new_tensor(tensor: Tensor, data: Any, dtype: Any = None, device: Any = None, requires_grad: Any = False) -> Tensor:
    device = tensor.device if device is None else _redirected(device)
    new = torch.tensor(data, dtype=dtype or tensor.dtype, device=HOST).to(device)
    return new.requires_grad_() if requires_grad else new


def _type(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:
        with DisableTorchFunction():
            name = tensor.type()
        return name.replace("torch.", "torch.cuda.") if on_gpu(tensor) else name
    legacy = legacy_type(dtype)
    return tensor.type(dtype, *args, **kwargs) if legacy is None else tensor.to(GPU_DEVICE, legacy)


def _repr(tensor: Tensor, **kwargs: Any) -> str:
    """Return the text that torch prints, with a sign in place of unknown values, and the shape of several elements."""
    value = known(tensor)
    if value is not None:
        text = repr(value)[len("tensor(") : -1]
    else:
        text = format_unknown("") + (f", size={tuple(tensor.shape)}" if tensor.dim() else "")
        if tensor.dtype not in (torch.float32, torch.int64, torch.bool):
            text += f", dtype={tensor.dtype}"
    device = f", device='{Shown.device}'" if on_gpu(tensor) else ""
    grad = f", grad_fn=<{type(tensor.grad_fn).__name__}>" if tensor.grad_fn is not None else ""
    grad = grad or (", requires_grad=True" if tensor.requires_grad else "")
    head = "Parameter containing:\n" if isinstance(tensor, nn.Parameter) else ""
    return f"{head}tensor({text}{device}{grad})"


UNIVERSAL = frozenset((Tensor.cuda, Tensor.pin_memory, Tensor.is_pinned, Tensor.type))
