"""Recording of a simulated step: the engine's events, the module of each event, and the categories of live tensors.

A request for memory belongs to the module that runs or, in the backward pass, to the module that created the autograd
node. Hooks on every module call maintain a stack of paths. Autograd numbers its nodes in the order in which the forward
pass creates them (torch/csrc/autograd/function.h, sequence_nr). The numbers at which modules begin and end therefore
identify the module that created a node.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer

from ...base.compat import current_autograd_node, get_sequence_nr
from ...hardware.gpu import GPU
from ...recording.parts import Mark
from ...recording.phases import Marks
from ..allocator.memory import AllocatorOutOfMemory
from ..engine.engine import Engine
from .operator_log import Operators

Labelled = Callable[[Callable[..., Any], str], Callable[..., Any]]
OUTSIDE = "(outside of modules)"
Referent = TypeVar("Referent")


class Place(NamedTuple):
    """The origin of a request for memory: the operator, and the module's path in its model ("" outside of any)."""

    operator: str
    module: str

    def __str__(self) -> str:
        """Return a readable form: "mm in lm_head" for aten.mm.default."""
        operator = self.operator.removeprefix("aten.").removesuffix(".default")
        return f"{operator} in {self.module}" if self.module else operator


def living(references: Iterable[weakref.ref[Referent]]) -> list[Referent]:
    """Return the objects that still exist."""
    return [target for reference in references if (target := reference()) is not None]


class Recording(Marks):
    """Marks the events of `engine`, and tells the engine which module each event belongs to."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.now, engine.address)
        self.engine = engine
        self.roots: list[weakref.ref[nn.Module]] = []  # modules that no other module called
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._stack: list[str] = []
        self._numbers: list[int] = []  # of autograd nodes, ascending; _paths: the module that runs from there on
        self._paths: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow module calls until the block ends."""
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        self.engine.place = self.place
        try:
            yield
        finally:
            self.engine.place = None
            for handle in handles:
                handle.remove()

    def place(self) -> Place:
        """Return where the operator that runs belongs."""
        return Place(str(self.engine.operator), self.path())

    def path(self) -> str:
        """Return the path of the module that runs, in the forward or the backward pass; "" outside of any."""
        if self._stack:
            return self._stack[-1]
        node = current_autograd_node()
        if node is None or not self._paths:
            return ""
        number = node._sequence_nr()
        if number > self._numbers[-1]:  # of AccumulateGrad, which no forward pass numbered
            return self._owner(getattr(node, "variable", None))
        place = bisect_right(self._numbers, number) - 1
        return self._paths[place] if place >= 0 else ""

    def own(self, model: nn.Module, *optimizers: Optimizer) -> None:
        """Attribute the parameters of `model`, their gradients and optimizer states to the parameters' modules."""
        for path, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    states = [value for optimizer in optimizers
                              for value in optimizer.state.get(parameter, {}).values()]  # fmt: skip
                    gradient = parameter.grad if parameter.is_leaf else None  # FSDP1 replaces parameters by views
                    for tensor in (parameter, gradient, *states):
                        if isinstance(tensor, Tensor):
                            self.engine.belongs(tensor, path or type(model).__name__)

    def _alive(self, named: dict[str, Any]) -> dict[int, str]:
        return dict.fromkeys(self.engine.handles.values(), "workspace") | super()._alive(named)

    def _owner(self, parameter: Tensor | None) -> str:
        if parameter is None:
            return ""
        modules = (item for root in living(self.roots) for item in root.named_modules())
        owners = (path for path, module in modules if any(own is parameter for own in module._parameters.values()))
        return next(owners, "")

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._name(module))
        self._begin(self._stack[-1])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        self._begin(self._stack[-1] if self._stack else "")

    def _begin(self, path: str) -> None:
        self._numbers.append(get_sequence_nr())
        self._paths.append(path)

    def _name(self, module: nn.Module) -> str:
        known = self._names.get(id(module))
        if known is None or known[0]() is not module:
            if not self._stack:
                self.roots.append(weakref.ref(module))
            for path, child in module.named_modules():
                self._names[id(child)] = weakref.ref(child), path or type(module).__name__
            known = self._names[id(module)]
        return known[1]


class StepRecording(Recording):
    """The recording of `lab.simulate`'s step, which reports itself when its phases begin."""

    def __init__(self, engine: Engine, gpu: GPU | None, on_phase: Callable[[str | None], None] | None = None) -> None:
        super().__init__(engine)
        self.on_phase = on_phase  # called when a phase begins, with None for one that does not count
        self.operators = Operators(gpu)  # of the step that counts
        self.loaded: int | None = None  # bytes allocated when loading was done
        self.peak_reserved: int | None = None
        self.reserved_before = 0  # peak reserved bytes of loading and warming up
        self.failed: tuple[AllocatorOutOfMemory, Place] | None = None

    def enter(self, phase: str, **alive: Any) -> None:
        """Mark that `phase` begins; `alive` has tensors, by part, that only the step knows."""
        self.operators.phase = phase
        self.engine.watch = self.operators if self.counting and phase != "load" else None
        # Optimizers read norms and scale by them (Adafactor's clipping), but no memory depends on these norms.
        self.engine.placeholder = 1.0 if phase == "optimizer" else None
        super().enter(phase, **alive)
        if self.on_phase:
            self.on_phase(self._counted())

    def labelled(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return `function`, wrapped so that its allocations are attributed to `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            since = len(self.engine.events)
            try:
                return function(*args, **kwargs)
            finally:
                made = {event.address: part for event in self.engine.events[since:] if event.size > 0}
                if made:
                    now = self.now()
                    self.marks.append(Mark(now, self._counted(), made, now))

        return call

    def _tensors(self) -> dict[str, list[Tensor]]:
        return {"kv_cache": self._replayed} if self._replayed else super()._tensors()

    @property
    def _replayed(self) -> list[Tensor]:
        """The cache after a replayed step, which moved no other tensors."""
        return getattr(self.step.decoder, "replayed", []) if self.step else []

    def _alive(self, named: dict[str, Any]) -> dict[int, str]:
        if self.step and not self._replayed:
            self.own(self.step.model, *([self.step.optimizer] if self.step.optimizer else []))
        return super()._alive(named)
