"""torch.compile on the simulated card."""
from __future__ import annotations
import sys
from contextlib import ExitStack, contextmanager
from unittest import mock
import torch
from ...base.compat import FakeTensor, FakeTensorMode
from ..card import Card
from ..devices import GPU_DEVICE
from .inductor import inner, CARD

SEES = ("torch._inductor.", "torch._dynamo.variables.", "torch._functorch.partitioners")

def _engines(value):
    return GPU_DEVICE if isinstance(value, torch.device) and value.type == "cuda" else value

@contextmanager
def compiled_on(card: Card):
    import torch._inductor.compile_fx as cf
    import torch._dynamo as dynamo
    from torch._dynamo import device_interface
    from torch._dynamo.variables import torch_function
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch.utils import _triton
    import torch.nn.modules.module as mm

    @contextmanager
    def tracing():
        real_device = FakeTensor.device
        dispatch = FakeTensorMode.dispatch
        def device(tensor):
            found = real_device.fget(tensor)
            if found == GPU_DEVICE and sys._getframe(1).f_globals.get("__name__", "").startswith(SEES):
                return CARD
            return found
        def mapped(self, func, types, args=(), kwargs=None):
            args = tuple(_engines(each) for each in args)
            kwargs = {name: _engines(each) for name, each in (kwargs or {}).items()}
            return dispatch(self, func, types, args, kwargs)
        with ExitStack() as stack:
            for each in (mm._global_forward_pre_hooks, mm._global_forward_hooks, mm._global_forward_hooks_always_called):
                stack.enter_context(mock.patch.dict(each, clear=True))
            stack.enter_context(mock.patch.object(FakeTensorMode, "dispatch", mapped))
            stack.enter_context(mock.patch.object(FakeTensor, "device", property(device, real_device.fset)))
            yield

    real, real_inner = cf.compile_fx, cf.compile_fx_inner
    def compile_fx(gm, inputs, inner_compile=real_inner, **options):
        return real(gm, inputs, inner_compile=inner(inner_compile, tracing), **options)
    state = torch_function.SymbolicTorchFunctionState
    init = state.__init__
    interface = device_interface.CudaInterface
    p = torch.cuda.get_device_properties(0)
    p.regs_per_multiprocessor=65536;p.max_threads_per_multi_processor=2048;p.max_threads_per_block=1024
    convert = CatchErrorsWrapper.__call__
    def call(self, *args):
        with tracing():
            return convert(self, *args)
    def reset():
        with mock.patch.object(card, "hidden", True):
            dynamo.reset()
    with ExitStack() as stack:
        put = lambda *a: stack.enter_context(mock.patch.object(*a))
        put(cf, "compile_fx", compile_fx)
        put(state, "__init__", lambda self, py_stack, *a, **k: init(self, (), *a, **k))
        put(_triton, "triton_hash_with_backend", lambda: "")
        for each in (interface, interface.Worker):
            put(each, "get_device_properties", staticmethod(lambda device=None: p))
        put(interface, "get_compute_capability", staticmethod(lambda device=None: p.major*10+p.minor))
        put(interface, "get_raw_stream", staticmethod(lambda device=None: 0))
        put(interface, "current_device", staticmethod(lambda: 0))
        put(interface, "is_available", staticmethod(lambda: True))
        dynamo.trace_rules.add("llmlab.simulation")
        put(CatchErrorsWrapper, "__call__", call)
        put(mm, "_has_any_global_hook", lambda: False)
        stack.callback(reset)
        yield
