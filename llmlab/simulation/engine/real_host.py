"""The real host of a simulated GPU: operators on plain tensors run for real, and values copied to the GPU stay known.

A script's data sets, samplers and token ids stay on the host, with their values. An operator is simulated if a fake
tensor is among its arguments, or if it creates a tensor on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...base.compat import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    disable_current_modes,
    tree_map_only,
)
from ...base.errors import NotAvailable
from ..devices import GPU_DEVICE
from ..values.collectives import COLLECTIVES, exchange
from ..values.known import SMALL, VALUES_LIMIT, Loan, is_followed, know, known
from ..values.placeholders import asked_by, initializing, located, value_for, warn_of
from .operators import is_composite

aten = torch.ops.aten
# Random operators whose values code uses, and their form with a generator.
DRAWS = {aten.randint.default: aten.randint.generator, aten.randint.low: aten.randint.low_generator,
         aten.randperm.default: aten.randperm.generator}  # fmt: skip

# These modules create buffers on the host as large as the model, which are fake, like parameters on the host.
OFFLOADING = "deepspeed.runtime.zero."

Simulate = Callable[[Any, tuple, dict[str, Any]], Any]


class RealHost:
    """Decides for each operator whether the host or the GPU runs it. `assume` is the value of every single number that
    is read, if the user sets it.

    `inside`: whether an operator of the GPU runs, whose fake kernel must see the devices under torch's own names.
    """

    def __init__(self, assume: float | None = None) -> None:
        self.assume = assume
        self.generator = torch.Generator().manual_seed(0)
        self.inside = False

    def run(self, simulate: Simulate, fake: FakeTensorMode, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator where it belongs: for real, or with the engine's `simulate` on tensors of `fake`."""
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":  # from torch.set_default_device
            kwargs = {**kwargs, "device": GPU_DEVICE}
        if kwargs.get("pin_memory"):  # from torch's own code; there is no driver that could pin it
            kwargs = {**kwargs, "pin_memory": False}
        tensors: list[Tensor] = []
        _collect(args, tensors)
        _collect(kwargs.values(), tensors)
        on_gpu = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not on_gpu and kwargs.get("device") != GPU_DEVICE and (tensors or not asked_by(OFFLOADING)):
            with disable_current_modes():
                done = func(*args, **kwargs)
            if func.namespace in COLLECTIVES:
                exchange(func, args, done)
            return done
        if self.assume is not None and not initializing():
            _assume(tensors, self.assume)
        if on_gpu and func._schema.is_mutable and tensors[0] is args[0] and not isinstance(args[0], FakeTensor):
            return _overwrite(func, args, self.assume)
        return self._simulate(simulate, fake, func, args, kwargs, tensors)

    def _simulate(
        self,
        simulate: Simulate,
        fake: FakeTensorMode,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """Run an operator on the simulated GPU; raise NotAvailable with the user's line if it cannot be simulated."""
        try:
            # The operators that a composite calls come here too, and its code may read tensors on the host.
            if not is_composite(func) and any(not isinstance(tensor, FakeTensor) for tensor in tensors):
                args, kwargs = tree_map_only(Tensor, lambda tensor: as_fake(fake, tensor), (args, kwargs))
            self.inside = True
            out = simulate(func, args, kwargs)
            return self._drawn(func, args, out) if func in DRAWS else out
        except NotAvailable as error:
            raise located(error) from None
        except RuntimeError as error:
            sparse = any(tensor.layout is not torch.strided for tensor in tensors)
            if sparse or "SparseTensorImpl" in str(error) or "SparseCsrTensorImpl" in str(error):
                message = f"{func} makes or takes a sparse tensor, which is not simulated"
                raise located(NotAvailable(f"{message}; to_dense() it on the host, or lab.measure it")) from None
            if not isinstance(error, UnsupportedOperatorException) and "fake impl" not in str(error):
                raise
            message = f"{func} has no fake kernel; register one with torch.library.register_fake, or lab.measure it"
            raise located(NotAvailable(message)) from error
        finally:
            self.inside = False

    def _drawn(self, func: Any, args: tuple, out: Tensor) -> Tensor:
        """Draw token ids and orders for real, from the simulator's own generator, because code uses their values."""
        if out.numel() <= VALUES_LIMIT:
            with disable_current_modes():
                know(out, DRAWS[func](*args, dtype=out.dtype, generator=self.generator))
        return out


def _collect(values: Iterable[Any], into: list[Tensor]) -> None:
    """Append the tensors among an operator's arguments to `into`, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            into.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, into)


def as_fake(fake: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor for one on the host, with its values if the engine follows them."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.is_nested:
        raise NotAvailable("nested tensors are not simulated; use padding and a mask, or lab.measure it")
    with disable_current_modes():
        made = fake.from_tensor(tensor.detach())
    if not tensor.is_meta and (is_followed(tensor) or _is_mask(tensor)):
        know(made, tensor)
    elif not (tensor.is_meta or tensor.is_inference()):  # inference tensors have no version counter
        know(made, tensor, Loan(tensor))
    return made


def _assume(tensors: list[Tensor], value: float) -> None:
    """Set the unknown single numbers among `tensors` to the value that the user assumes."""
    for tensor in tensors:
        if tensor.numel() == 1 and known(tensor) is None:
            with disable_current_modes():
                know(tensor, torch.full(tuple(tensor.shape), value_for(tensor.dtype, value), dtype=tensor.dtype))


def _is_mask(tensor: Tensor) -> bool:
    """Whether floats look like a mask, which code may test for causality; weights and data do not."""
    if tensor.dim() < 2 or tensor.numel() > VALUES_LIMIT or not tensor.is_floating_point():
        return False
    with disable_current_modes():
        sample = tensor.flatten()[:: max(1, tensor.numel() // SMALL)].float()
        return bool(((sample == 0) | (sample == 1) | (sample <= torch.finfo(torch.float16).min)).all())


def _overwrite(func: Any, args: tuple, assume: float | None) -> Tensor:
    """Let `func` write to a real tensor, its first argument: values that are known, or the placeholder."""
    real = args[0]
    if func is torch.ops.aten.copy_.default and (value := known(args[1])) is not None:
        with disable_current_modes():
            return real.copy_(value)
    if assume is None and not real.is_floating_point():
        raise located(NotAvailable(
            f"{func} writes values from the simulated GPU, which has none, into a {real.dtype} tensor; say what whole "
            "numbers are, lab.simulator(..., assume=1.0) or llmlab run --assume 1, or lab.measure it"
        ))  # fmt: skip
    if assume is None:
        warn_of("a copy to the host")
    with disable_current_modes():
        return real.fill_(value_for(real.dtype, assume))
