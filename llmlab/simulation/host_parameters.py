"""Parameters on the host of a simulated GPU: they are fake too, so that no model takes this machine's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ..base.compat import FakeTensor, disable_current_modes
from .checkpoints.files import Checkpoints
from .engine.engine import Engine
from .engine.real_host import as_fake


class HostParameters:
    """Makes each new parameter fake, and those made before the block when their module moves."""

    def __init__(self, engine: Engine, checkpoints: Checkpoints) -> None:
        self.engine, self.checkpoints = engine, checkpoints
        self._thread = threading.get_ident()
        self._real: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id: a real parameter, and its fake
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace parameters as they are made and as modules move; at the end, those made before are real again."""
        real_new, fake_new, apply = nn.Parameter.__new__, FakeTensor.__new__, nn.Module._apply

        def new(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> Tensor:
            if cls is nn.Parameter and type(data) is Tensor and data.device.type == "cpu" and self._simulates():
                data = self._fake(data)
            return real_new(cls, data, requires_grad)

        def like(cls: type, *args: Any, **kwargs: Any) -> Tensor:
            # `type(parameter)(data)`: libraries make a parameter of the class that one had, which is FakeTensor here.
            if args and isinstance(args[0], Tensor):
                return new(nn.Parameter, args[0], kwargs.get("requires_grad", True))
            return fake_new(cls, *args, **kwargs)

        def apply_to_fake(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
            if recurse:
                self.replace(module)
            return apply(module, fn, recurse)

        with (
            mock.patch.object(nn.Parameter, "__new__", new),
            mock.patch.object(FakeTensor, "__new__", like),
            mock.patch.object(nn.Module, "_apply", apply_to_fake),
        ):
            try:
                yield
            finally:
                for module, name, parameter in self._replaced:
                    module._parameters[name] = parameter

    def move(self, module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` to the module's own parameters and buffers, as Module.to does to those of all modules in it."""
        self.replace(module)
        module._apply(fn, False)

    def _simulates(self) -> bool:
        """Whether a parameter that is made now is simulated: not in a second thread, nor in a file that is read."""
        return not self.checkpoints.plain and threading.get_ident() == self._thread

    def _fake(self, data: Tensor) -> Tensor:
        with disable_current_modes(), self.engine.fake:
            fake = torch.empty_strided(data.size(), data.stride(), dtype=data.dtype, device="cpu")
        self.engine.on_host.hold(fake)
        return fake

    def replace(self, module: nn.Module, buffers: bool = False) -> None:
        """Put one fake parameter in the place of each real one, in all modules that share it, and of `buffers`."""
        made: dict[int, Tensor] = {}
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if type(parameter) is not nn.Parameter or parameter.is_meta:
                    continue
                if id(parameter) not in self._real:
                    fake = nn.Parameter(self._fake(parameter.data), parameter.requires_grad)
                    self._real[id(parameter)] = parameter, fake
                child._parameters[name] = self._real[id(parameter)][1]
                self._replaced.append((child, name, parameter))
            for name, buffer in child._buffers.items() if buffers else ():
                if type(buffer) is Tensor and not buffer.is_meta:
                    child._buffers[name] = made.setdefault(id(buffer), as_fake(self.engine.fake, buffer))
