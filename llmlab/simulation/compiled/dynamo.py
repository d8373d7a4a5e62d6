"""Dynamo on the simulated GPU: it traces the tensors of the GPU, and the code it calls sees a CUDA device.

torch.compile is torch's own: Dynamo traces a frame, AOTAutograd builds the joint graph and partitions it, and Inductor
lowers and schedules the parts (inductor.py). In a torch without CUDA, autograd rejects tensors on "cuda", even fake
ones, so all fake tensors stay on the engine's GPU_DEVICE. `tracing` shows `Shown.device` to code that decides by the
device, and creates tensors for "cuda" on GPU_DEVICE.
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
from ..devices import GPU_DEVICE, Shown
from ..simulated_gpu import SimulatedGPU
from ..streams import nothing

OURS = "llmlab.simulation"
# Modules that decide by the device: of a traced tensor (`x.device`), of a saved tensor, and of a kernel.
SEES_CARD = ("torch._dynamo.variables.", "torch._functorch.partitioners", "torch._inductor.")
# It compares the device of a DTensor's part with that of its mesh, which is "cuda" in scripts, else the engine's.
COMPARES_MESH = "torch.distributed.tensor."
# Functions that answer for the GPU. Dynamo treats their results as constants, like those of torch's own functions.
ANSWERS = (
    "torch.accelerator.current_device_index", "torch.accelerator.is_available", "torch.cuda.current_device",
    "torch.cuda.device_count", "torch.cuda.get_device_capability", "torch.cuda.get_device_name",
    "torch.cuda.is_available", "torch.cuda.is_bf16_supported", "torch.cuda.is_initialized",
    "torch.get_autocast_dtype", "torch.get_autocast_gpu_dtype", "torch.is_autocast_enabled",
)  # fmt: skip
ENTERS_AUTOCAST = "_enter_autocast"  # its argument is the name of a device type
# The pools of CUDA graphs, whose module cannot be imported without CUDA.
CUDA_GRAPHS = ModuleType("torch._inductor.cudagraph_trees")
vars(CUDA_GRAPHS).update(dict.fromkeys(("get_manager", "mark_step_begin", "reset_cudagraph_trees"), nothing))
HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")  # in torch.nn.modules.module


@contextmanager
def dynamo_on(gpu: SimulatedGPU) -> Iterator[None]:
    """Let Dynamo trace code that runs on `gpu` until the block ends; then it discards its compiled code."""
    check("torch._dynamo.convert_frame")
    frames = symbol("torch._dynamo.convert_frame")
    function_state = symbol("torch._dynamo.variables.torch_function.SymbolicTorchFunctionState")
    tracer = symbol("torch._dynamo.output_graph.SubgraphTracer")
    guards = symbol("torch._guards.GuardsSet")
    convert, init, create = frames.CatchErrorsWrapper.__call__, function_state.__init__, tracer.create_proxy
    add = guards.add
    symbol("torch._dynamo.trace_rules.add")(OURS)  # Dynamo must not trace the frames of the engine

    def converted(self: Any, frame: Any, *args: Any) -> Any:
        try:
            # When it splits a graph for DDP's buckets, Dynamo leaves modes on.
            with disable_current_modes(), tracing(gpu), uncollected():
                return convert(self, frame, *args)
        except symbol("torch._dynamo.exc.InternalTorchDynamoError") as error:
            place = f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno}"
            gpu.engine.ran_eager(f"{frame.f_code.co_name} ({place})", error)
            return frames.ConvertFrameReturn()

    def create_proxy(self: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        if getattr(target, "__name__", "") != ENTERS_AUTOCAST:
            args, kwargs = (torch.fx.node.map_aggregate(values, _of_engine) for values in (args, kwargs))
        return create(self, kind, target, args, kwargs, *rest, **options)

    # Dynamo adds guards for the hooks that it follows, as in a checkpointed layer. Our hooks are hidden only during
    # tracing, so such a guard would fail, and Dynamo would compile again at each call.
    def added(self: Any, guard: Any, **options: Any) -> None:
        if not any(name in guard.name for name in HOOKS):
            add(self, guard, **options)

    # Our torch function mode is not part of the script, so Dynamo must not trace into it.
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
        # If this function exists, patching/patches.py replaces it by one of ours.
        if is_tracing := getattr(sys.modules.get("transformers.masking_utils"), "is_tracing", None):
            rules[is_tracing] = symbol("torch._dynamo.variables.functions.UserFunctionVariable")
        theirs = symbol("torch._dynamo.trace_rules.get_torch_obj_rule_map")

        def rule_map() -> ChainMap[Any, Any]:
            return ChainMap(rules, theirs())

        rule_map.cache_clear = theirs.cache_clear  # type: ignore[attr-defined]  # init_process_group calls it
        stack.enter_context(mock.patch.object(symbol("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", rule_map))
        stack.enter_context(mock.patch.object(tracer, "create_proxy", create_proxy))
        stack.enter_context(mock.patch.object(guards, "add", added))
        stack.enter_context(mock.patch.object(frames.CatchErrorsWrapper, "__call__", converted))
        stack.enter_context(mock.patch.object(function_state, "__init__", without_modes))
        # Else it warns about ours.
        stack.enter_context(mock.patch.object(modules, "_has_any_global_hook", lambda: False))
        yield


@contextmanager
def tracing(gpu: SimulatedGPU) -> Iterator[None]:
    """Show `Shown.device` for fake tensors of the GPU to code that decides by the device, and hide our module hooks."""
    real: Any = FakeTensor.device  # a property
    dispatch = FakeTensorMode.dispatch
    deciding = (*SEES_CARD, COMPARES_MESH) if gpu.engine.host else SEES_CARD

    def sees_cuda(asking: str) -> bool:
        return asking.startswith(deciding)

    def device(tensor: FakeTensor) -> torch.device:
        value = real.fget(tensor)
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return Shown.device if value == GPU_DEVICE and sees_cuda(asking) else value

    def is_cuda(tensor: FakeTensor) -> bool:
        return tensor.fake_device == GPU_DEVICE and sees_cuda(sys._getframe(1).f_globals.get("__name__", ""))

    def dispatched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(_of_engine(arg) for arg in args)
        kwargs = {name: _of_engine(value) for name, value in (kwargs or {}).items()}
        return dispatch(self, func, types, args, kwargs)

    metas = symbol("torch._meta_registrations")
    hint = metas.device_hint

    def device_hint(tensor: Any) -> str:
        """Answer "cuda" to meta functions, some of which accept fewer dtypes on a CPU."""
        on_gpu = isinstance(tensor, FakeTensor) and tensor.fake_device == GPU_DEVICE
        return Shown.device.type if on_gpu else hint(tensor)

    real_to = FunctionalTensor.to

    def to(tensor: FunctionalTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Accept "cuda", which DTensor.from_local passes as the device type of its mesh."""
        options = {name: _of_engine(value) for name, value in kwargs.items()}
        return real_to(tensor, *map(_of_engine, args), **options)

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
    """Turn the garbage collector off. A compiler creates millions of objects and few cycles, and scanning them over and
    over takes a tenth of its time."""
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
    return torch.zeros(len(torch.get_rng_state()), dtype=torch.uint8)  # becomes fake inside a graph


def _unread(*args: Any, **kwargs: Any) -> str:
    """Skip the text of a graph, which Dynamo prints to a log; that takes seconds."""
    return ""


def _of_engine(value: Any) -> Any:
    if isinstance(value, torch.device):
        return GPU_DEVICE if value.type == "cuda" else value
    return GPU_DEVICE if type(value) is str and value.partition(":")[0] == "cuda" else value


def on_device(graph: GraphModule, device: torch.device) -> None:
    """Let the nodes of `graph` create tensors on `device` instead of the GPU, under either of its two names."""

    def renamed(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value in (Shown.device, GPU_DEVICE) else value

    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.args = torch.fx.node.map_aggregate(node.args, renamed)
                node.kwargs = torch.fx.node.map_aggregate(node.kwargs, renamed)
            module.recompile()

