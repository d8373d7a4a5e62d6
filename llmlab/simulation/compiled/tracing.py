"""torch.compile on the simulated card."""
from __future__ import annotations
from contextlib import ExitStack, contextmanager
from unittest import mock
import torch
from ..card import Card
from ..devices import GPU_DEVICE
from .inductor import inner, moved

def swap(value):
    if isinstance(value, torch.device) and value.type == "cuda": return GPU_DEVICE
    if type(value) is str and (value == "cuda" or value.startswith("cuda:")): return GPU_DEVICE
    return value

@contextmanager
def compiled_on(card: Card):
    import torch._inductor.compile_fx as cf
    import torch._dynamo as dynamo
    from torch._dynamo import device_interface
    from torch._dynamo.variables import torch_function
    from torch.utils import _triton
    from torch._inductor.runtime.hints import DeviceProperties
    real, real_inner = cf.compile_fx, cf.compile_fx_inner
    def compile_fx(gm, inputs, inner_compile=real_inner, **options):
        return real(gm, inputs, inner_compile=inner(inner_compile), **options)
    state = torch_function.SymbolicTorchFunctionState
    init = state.__init__
    interface = device_interface.CudaInterface
    p = torch.cuda.get_device_properties(0)
    p.regs_per_multiprocessor=65536;p.max_threads_per_multi_processor=2048;p.max_threads_per_block=1024
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
        from torch._dynamo.convert_frame import CatchErrorsWrapper
        from torch._dynamo.output_graph import SubgraphTracer
        create = SubgraphTracer.create_proxy
        def create_proxy(self, kind, target, args, kwargs, *rest, **named):
            if getattr(target, "__name__", "") not in ("_enter_autocast",):
                args, kwargs = torch.fx.node.map_aggregate(args, swap), torch.fx.node.map_aggregate(kwargs, swap)
            return create(self, kind, target, args, kwargs, *rest, **named)
        put(SubgraphTracer, "create_proxy", create_proxy)
        convert = CatchErrorsWrapper.__call__
        def call(self, *args):
            import torch.nn.modules.module as mm
            with mock.patch.dict(mm._global_forward_pre_hooks, clear=True), mock.patch.dict(mm._global_forward_hooks, clear=True), mock.patch.dict(mm._global_forward_hooks_always_called, clear=True):
                return convert(self, *args)
        put(CatchErrorsWrapper, "__call__", call)
        put(torch.nn.modules.module, "_has_any_global_hook", lambda: False)
        def reset():
            with mock.patch.object(card, "hidden", True):
                dynamo.reset()
        stack.callback(reset)
        yield
