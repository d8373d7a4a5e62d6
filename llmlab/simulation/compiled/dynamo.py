"""Dynamo on the simulated card: it traces the card's tensors, and what it calls sees a CUDA card.

torch.compile is torch's own. Dynamo traces a frame, AOTAutograd makes the joint graph and cuts it, Inductor lowers and
schedules the parts (inductor.py). Autograd of a torch without CUDA cannot take tensors on "cuda", not even fake ones,
so all fake tensors stay where the engine has them, on GPU_DEVICE: `tracing` lets code that decides by the device read
"cuda:0" of them, and makes there what is asked for on "cuda".
"""

from __future__ import annotations

import gc
import sys
from collections import ChainMap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule
from torch.nn.modules import module as modules

from ...base.compat import FakeTensor, FakeTensorMode, FunctionalTensor, check, disable_current_modes, symbol
from ..card import Card
from ..devices import GPU_DEVICE
from ..streams import nothing

CARD = torch.device("cuda", 0)
OURS = "llmlab.simulation"
# They choose by the device: of a traced tensor (what `x.device` gives), of a saved one, of a kernel.
SEES_CARD = ("torch._dynamo.variables.", "torch._functorch.partitioners", "torch._inductor.")
# It compares the device of a DTensor's part with its mesh's: a script's is "cuda", that of a step of ours the engine's.
COMPARES_MESH = "torch.distributed.tensor."
# Functions that answer for the card: Dynamo takes what they say for constants, as it does with torch's.
ANSWERS = (
    "torch.accelerator.current_device_index", "torch.accelerator.is_available", "torch.cuda.current_device",
    "torch.cuda.device_count", "torch.cuda.get_device_capability", "torch.cuda.get_device_name",
    "torch.cuda.is_available", "torch.cuda.is_bf16_supported", "torch.cuda.is_initialized",
    "torch.get_autocast_dtype", "torch.get_autocast_gpu_dtype", "torch.is_autocast_enabled",
)  # fmt: skip
ENTERS_AUTOCAST = "_enter_autocast"  # it takes the name of a kind of device
# CUDA graphs' pools, which a torch without CUDA cannot import.
CUDA_GRAPHS = ModuleType("torch._inductor.cudagraph_trees")
vars(CUDA_GRAPHS).update(dict.fromkeys(("get_manager", "mark_step_begin", "reset_cudagraph_trees"), nothing))
HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")  # in torch.nn.modules.module


@contextmanager
def dynamo_on(card: Card) -> Iterator[None]:
    """Let Dynamo trace what runs on `card`, until the block ends; then it forgets what it compiled."""
    check("torch._dynamo.convert_frame")
    frames = symbol("torch._dynamo.convert_frame")
    function_state = symbol("torch._dynamo.variables.torch_function.SymbolicTorchFunctionState")
    tracer = symbol("torch._dynamo.output_graph.SubgraphTracer")
    guards = symbol("torch._guards.GuardsSet")
    convert, init, create = frames.CatchErrorsWrapper.__call__, function_state.__init__, tracer.create_proxy
    add = guards.add
    symbol("torch._dynamo.trace_rules.add")(OURS)  # the engine's own frames are none of the script's

    def converted(self: Any, frame: Any, *args: Any) -> Any:
        try:
            # With DDP's buckets Dynamo leaves modes on.
            with disable_current_modes(), tracing(card), uncollected():
                return convert(self, frame, *args)
        except symbol("torch._dynamo.exc.InternalTorchDynamoError") as error:
            place = f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno}"
            card.engine.ran_eager(f"{frame.f_code.co_name} ({place})", error)
            return frames.ConvertFrameReturn()

    def create_proxy(self: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        if getattr(target, "__name__", "") != ENTERS_AUTOCAST:
            args, kwargs = (torch.fx.node.map_aggregate(values, _of_engine) for values in (args, kwargs))
        return create(self, kind, target, args, kwargs, *rest, **named)

    # Where it follows hooks, as of a checkpointed layer, it guards these; without ours they are as it traces alone, and
    # each call would be compiled anew.
    def added(self: Any, guard: Any, **options: Any) -> None:
        if not any(name in guard.name for name in HOOKS):
            add(self, guard, **options)

    # Our mode over functions is no code of the script's: it is not traced into.
    def without_modes(self: Any, modes: Any, *args: Any, **kwargs: Any) -> None:
        init(self, (), *args, **kwargs)

    with ExitStack() as stack:
        if CUDA_GRAPHS.__name__ not in sys.modules:
            sys.modules[CUDA_GRAPHS.__name__] = CUDA_GRAPHS
            stack.callback(sys.modules.pop, CUDA_GRAPHS.__name__)
        stack.callback(symbol("torch._dynamo.reset"))
        answers = [symbol(name) for name in ANSWERS]
        variables = symbol("torch._dynamo.variables.torch")
        stack.enter_context(mock.patch.dict(variables.constant_fold_functions, dict.fromkeys(answers)))
        rules = dict.fromkeys(answers, variables.TorchInGraphFunctionVariable)
        # Where there is one, patching/patches.py puts a function of ours in its place.
        if is_tracing := getattr(sys.modules.get("transformers.masking_utils"), "is_tracing", None):
            rules[is_tracing] = symbol("torch._dynamo.variables.functions.UserFunctionVariable")
        theirs = symbol("torch._dynamo.trace_rules.get_torch_obj_rule_map")

        def rule_map() -> ChainMap[Any, Any]:
            return ChainMap(rules, theirs())

        rule_map.cache_clear = theirs.cache_clear  # type: ignore[attr-defined]  # init_process_group does
        stack.enter_context(mock.patch.object(symbol("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", rule_map))
        stack.enter_context(mock.patch.object(tracer, "create_proxy", create_proxy))
        stack.enter_context(mock.patch.object(guards, "add", added))
        stack.enter_context(mock.patch.object(frames.CatchErrorsWrapper, "__call__", converted))
        stack.enter_context(mock.patch.object(function_state, "__init__", without_modes))
        stack.enter_context(mock.patch.object(modules, "_has_any_global_hook", lambda: False))  # it warns of ours
        yield


@contextmanager
def tracing(card: Card) -> Iterator[None]:
    """Show fake tensors of the card as on "cuda:0" to what chooses by it, and leave out hooks that follow modules."""
    real: Any = FakeTensor.device  # a property
    dispatch = FakeTensorMode.dispatch
    choosing = (*SEES_CARD, COMPARES_MESH) if card.engine.host else SEES_CARD

    def seen(asking: str) -> bool:
        return asking.startswith(choosing)

    def device(tensor: FakeTensor) -> torch.device:
        value = real.fget(tensor)
        return CARD if value == GPU_DEVICE and seen(sys._getframe(1).f_globals.get("__name__", "")) else value

    def is_cuda(tensor: FakeTensor) -> bool:
        return tensor.fake_device == GPU_DEVICE and seen(sys._getframe(1).f_globals.get("__name__", ""))

    def dispatched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(_of_engine(arg) for arg in args)
        kwargs = {name: _of_engine(value) for name, value in (kwargs or {}).items()}
        return dispatch(self, func, types, args, kwargs)

    metas = symbol("torch._meta_registrations")
    hint = metas.device_hint

    def device_hint(tensor: Any) -> str:
        """As the functions that make fakes read it: of the CPU some take fewer dtypes."""
        on_card = isinstance(tensor, FakeTensor) and tensor.fake_device == GPU_DEVICE
        return CARD.type if on_card else hint(tensor)

    real_to = FunctionalTensor.to

    def to(tensor: FunctionalTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As DTensor.from_local calls it, with its mesh's kind of device."""
        named = {name: _of_engine(value) for name, value in kwargs.items()}
        return real_to(tensor, *map(_of_engine, args), **named)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FunctionalTensor, "to", to))
        stack.enter_context(mock.patch.object(metas, "device_hint", device_hint))
        for name in HOOKS:
            hooks = getattr(modules, name)
            theirs = {key: hook for key, hook in hooks.items() if not _is_ours(hook)}
            stack.enter_context(mock.patch.dict(hooks, theirs, clear=True))
        stack.enter_context(mock.patch.object(FakeTensorMode, "dispatch", dispatched))
        stack.enter_context(mock.patch.object(torch.cuda, "get_rng_state", _random_state))
        stack.enter_context(mock.patch.object(GraphModule, "print_readable", _unread))
        stack.enter_context(mock.patch.object(FakeTensor, "device", property(device, real.fset)))
        stack.enter_context(mock.patch.object(FakeTensor, "is_cuda", property(is_cuda), create=True))
        yield


@contextmanager
def uncollected() -> Iterator[None]:
    """Let no garbage be collected: a compiler makes millions of objects and few cycles, and Python looks through all of
    them again and again, which takes a tenth of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith(OURS)


def _random_state(device: Any = None) -> torch.Tensor:
    return torch.zeros(len(torch.get_rng_state()), dtype=torch.uint8)  # fake where it is asked for in a graph


def _unread(*args: Any, **kwargs: Any) -> str:
    """Each graph is written out for a log, which takes seconds."""
    return ""


def _of_engine(value: Any) -> Any:
    if isinstance(value, torch.device):
        return GPU_DEVICE if value.type == "cuda" else value
    return GPU_DEVICE if type(value) is str and value.partition(":")[0] == "cuda" else value


def on_device(graph: GraphModule, device: torch.device) -> None:
    """Let the nodes of `graph` make on `device` what they make on the card, by whichever of its two names."""

    def renamed(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value in (CARD, GPU_DEVICE) else value

    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.args = torch.fx.node.map_aggregate(node.args, renamed)
                node.kwargs = torch.fx.node.map_aggregate(node.kwargs, renamed)
            module.recompile()

