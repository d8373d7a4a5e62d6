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
def fake_bitsandbytes(on_card: bool) -> Iterator[None]:
    """Let bitsandbytes' 4-bit and 8-bit parameters be fake tensors; `on_card`: its linears do not ask for this CPU's
    kernels."""
    if find_spec("bitsandbytes") is None:
        yield
        return
    check("bitsandbytes")
    import bitsandbytes
    from bitsandbytes.nn import modules

    update = _with_unread_norm(bitsandbytes.functional.optimizer_update_32bit)
    with ExitStack() as stack:
        patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        patch(modules.Params4bit, "__new__", _params4bit(modules.Params4bit))
        patch(modules.Int8Params, "__new__", _int8params(modules.Int8Params))
        patch(bitsandbytes.functional, "optimizer_update_32bit", update)
        # The map of 8-bit values, which is made once per process and kept on its card.
        stack.enter_context(mock.patch.dict(bitsandbytes.functional.name2qmap, clear=True))
        if on_card:
            patch(modules, "has_avx512bf16", lambda: False)
            patch(bitsandbytes, "matmul", _matmul)
        yield


def _params4bit(owner: Any) -> Any:
    real_new, quantize = owner.__new__, owner._quantize

    class Params4bit(FakeTensor):
        """bitsandbytes' Params4bit: a Parameter cannot wrap a fake tensor, so a fake tensor takes its place."""

        bnb_quantized: bool

        def to(self, *args: Any, **kwargs: Any) -> Tensor:
            device = parse_to(*args, **kwargs)[0]
            if device is not None and device.type != "meta" and not self.bnb_quantized:
                quantized = quantize(self, device)
                quantized.fake_device = quantized.quant_state.absmax.fake_device  # `.data =` leaves it
                return quantized
            return super().to(*args, **kwargs)

    def new(
        cls: type, data: Tensor | None = None, requires_grad: bool = False, quant_state: Any = None,
        blocksize: int | None = None, compress_statistics: bool = True, quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8, module: Any = None, bnb_quantized: bool = False, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        values = {
            "quant_state": quant_state,
            "blocksize": 64 if blocksize is None else blocksize,
            "compress_statistics": compress_statistics,
            "quant_type": quant_type,
            "quant_storage": quant_storage,
            "module": module,
            "bnb_quantized": bnb_quantized,
        }
        if not isinstance(data, FakeTensor):
            return real_new(cls, data, requires_grad, **values, **kwargs)
        return _as_parameter(Params4bit, data, requires_grad, values)

    return new


def _int8params(owner: Any) -> Any:
    real_new, quantize = owner.__new__, owner._quantize

    class Int8Params(FakeTensor):
        """bitsandbytes' Int8Params, as Params4bit above."""

        def to(self, *args: Any, **kwargs: Any) -> Tensor:
            device = parse_to(*args, **kwargs)[0]
            if device is not None and device.type != "meta" and self.dtype != torch.int8:
                quantized = quantize(self, device)
                quantized.fake_device = quantized.CB.device  # `.data =` leaves it; transformers quantizes from the host
                return quantized
            return super().to(*args, **kwargs)

    def new(
        cls: type, data: Tensor | None = None, requires_grad: bool = True, has_fp16_weights: bool = False,
        CB: Tensor | None = None, SCB: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        values = {"has_fp16_weights": has_fp16_weights, "CB": CB, "SCB": SCB}
        if not isinstance(data, FakeTensor):
            return real_new(cls, data, requires_grad, **values, **kwargs)
        return _as_parameter(Int8Params, data, requires_grad, values)

    return new


def _with_unread_norm(update: Callable[..., None]) -> Callable[..., None]:
    """bitsandbytes/functional.py, optimizer_update_32bit: LARS and LAMB give their kernel the parameter's norm, which
    the call reads. No memory depends on what it is."""
    parameters = signature(update)

    def updated(*args: Any, **kwargs: Any) -> None:
        given = parameters.bind(*args, **kwargs)
        if not given.arguments.get("max_unorm") or not isinstance(p := given.arguments["p"], FakeTensor):
            return update(*args, **kwargs)
        norm = torch.norm(p.data.float())  # it is there while the kernel runs
        given.arguments["max_unorm"] = 0.0
        update(*given.args, **given.kwargs)
        del norm

    return updated


def _as_parameter(kind: type, data: Tensor, requires_grad: bool, values: dict[str, Any]) -> Tensor:
    self = data.detach()
    self.__class__ = kind
    self._is_param = True
    self.requires_grad = requires_grad
    for name, value in values.items():
        setattr(self, name, value)
    return self


def _matmul(
    A: Tensor, B: Tensor, out: Tensor | None = None, state: Any = None, threshold: float = 0.0, bias: Any = None
) -> Tensor:
    """bitsandbytes/autograd/_functions.py, matmul, which on a CPU takes another function for training."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    if threshold > 0:
        state.threshold = threshold
    return MatMul8bitLt.apply(A, B, out, bias, state)
