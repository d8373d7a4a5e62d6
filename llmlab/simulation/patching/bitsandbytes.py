"""Monkeypatches of bitsandbytes: its NF4 and int8 parameters as fake tensors (kernels: workspaces/bitsandbytes.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from inspect import signature
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...base.compat import FakeTensor, check, parse_to


@contextmanager
def fake_bitsandbytes(on_gpu: bool) -> Iterator[None]:
    """Let the 4-bit and 8-bit parameters of bitsandbytes be fake tensors; with `on_gpu`, its linear layers do not use
    the kernels of this CPU."""
    if find_spec("bitsandbytes") is None:
        yield
        return
    check("bitsandbytes")
    import bitsandbytes
    from bitsandbytes.nn import modules

    update = _with_unread_norm(bitsandbytes.functional.optimizer_update_32bit)
    with ExitStack() as stack:
        patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        kinds: dict[Any, tuple[Callable[[Any], bool], Callable[[Any], torch.device]]] = {
            modules.Params4bit: (lambda self: self.bnb_quantized, lambda self: self.quant_state.absmax.fake_device),
            modules.Int8Params: (lambda self: self.dtype == torch.int8, lambda self: self.CB.device),
        }
        for owner, (is_quantized, place) in kinds.items():
            patch(owner, "__new__", _fake_parameters(owner, is_quantized, place))
        patch(type(modules.Params4bit), "__instancecheck__", _instance_check(type(modules.Params4bit)))
        patch(bitsandbytes.functional, "optimizer_update_32bit", update)
        # The table of 8-bit values, which bitsandbytes creates once per process and keeps on the GPU.
        stack.enter_context(mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True))
        if on_gpu:
            patch(modules, "has_avx512bf16", lambda: False)
            patch(bitsandbytes, "matmul", _matmul)
        yield


def _fake_parameters(
    owner: Any, is_quantized: Callable[[Any], bool], place: Callable[[Any], torch.device]
) -> Callable[..., Tensor]:
    """Return a __new__ of `owner`, Params4bit or Int8Params, that accepts fake tensors too.

    A Parameter cannot wrap a fake tensor, so a subclass of FakeTensor replaces the parameter. `place` returns the
    device of the quantized scales or values.
    """
    real_new, quantize, parameters = owner.__new__, owner._quantize, signature(owner.__new__)

    def to(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        device = parse_to(*args, **kwargs)[0]
        if device is None or device.type == "meta" or is_quantized(self):
            return FakeTensor.to(self, *args, **kwargs)
        quantized = quantize(self, device)
        quantized.fake_device = place(quantized)  # `.data =` does not set it; transformers quantizes from the host
        return quantized

    def recreate(cls: type, data: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # accelerate calls `type(parameter)(data, **vars(parameter))` to create a parameter on "meta".
        return new(owner, data, *args, **{name: kwargs[name] for name in parameters.parameters if name in kwargs})

    kind = type(owner.__name__, (FakeTensor,), {"to": to, "__new__": recreate, "replaces": owner})

    def new(cls: type, data: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(data, FakeTensor):
            return real_new(cls, data, *args, **kwargs)
        bound = parameters.bind(cls, data, *args, **kwargs)
        bound.apply_defaults()
        _, _, requires_grad, *names = parameters.parameters
        parameter: Any = data.detach()
        parameter.__class__ = kind
        parameter._is_param = True
        parameter.requires_grad = bound.arguments[requires_grad]
        for name in names[:-1]:  # the last is **kwargs, for arguments of other versions
            setattr(parameter, name, bound.arguments[name])
        if getattr(parameter, "blocksize", 64) is None:  # Params4bit.__new__
            parameter.blocksize = 64
        return parameter

    return new


def _instance_check(metaclass: type) -> Callable[[type, Any], bool]:
    """Return an __instancecheck__ for which a replacement is an instance of the class that it replaces, as Lightning
    and peft ask."""
    real: Any = metaclass.__instancecheck__
    return lambda cls, value: real(cls, value) or getattr(type(value), "replaces", None) is cls


def _with_unread_norm(update: Callable[..., None]) -> Callable[..., None]:
    """bitsandbytes/functional.py, optimizer_update_32bit: for LARS and LAMB the call reads the norm of the parameter
    and passes it to the kernel. The memory does not depend on its value."""
    parameters = signature(update)

    def updated(*args: Any, **kwargs: Any) -> None:
        bound = parameters.bind(*args, **kwargs)
        if not bound.arguments.get("max_unorm") or not isinstance(p := bound.arguments["p"], FakeTensor):
            return update(*args, **kwargs)
        norm = torch.norm(p.data.float())  # it stays allocated while the kernel runs
        bound.arguments["max_unorm"] = 0.0
        update(*bound.args, **bound.kwargs)
        del norm

    return updated


def _matmul(
    A: Tensor, B: Tensor, out: Tensor | None = None, state: Any = None, threshold: float = 0.0, bias: Any = None
) -> Tensor:
    """bitsandbytes/autograd/_functions.py, matmul, which calls a different function when it trains on a CPU."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    if threshold > 0:
        state.threshold = threshold
    return MatMul8bitLt.apply(A, B, out, bias, state)
