"""Inductor on the simulated card: it writes its wrapper, which runs here with kernels that do nothing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...base.compat import FakeTensor, disable_current_modes, tree_map_only, symbol
from ..devices import GPU_DEVICE

CARD = torch.device("cuda", 0)


def moved(gm, inputs, to):
    """Put graph and inputs on `to`, from the other of the two names of the card."""
    def device(value):
        if isinstance(value, torch.device) and (value.type == "cuda" or value == GPU_DEVICE):
            return to
        return value
    def swap(value):
        if isinstance(value, (tuple, list)):
            return type(value)(swap(v) for v in value) if type(value) in (tuple, list) else value
        if isinstance(value, dict):
            return {k: swap(v) for k, v in value.items()}
        if isinstance(value, slice): return value
        if type(value) is str and (value == "cuda" or value.startswith("cuda:")): return to
        return device(value)
    seen = set()
    def put(tensor):
        if isinstance(tensor, FakeTensor) and (tensor.fake_device.type == "cuda" or tensor.fake_device == GPU_DEVICE):
            tensor.fake_device = to
        return tensor
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule): continue
        for node in module.graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, swap)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, swap)
            for name in ("val", "example_value", "tensor_meta"):
                if name in node.meta:
                    tree_map_only(Tensor, put, node.meta[name])
        module.recompile()
    tree_map_only(Tensor, put, inputs)


class Kernel:
    def run(self, *args, **kwargs): pass


def empty(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype, device=GPU_DEVICE)


def reinterpret(tensor, size, stride, offset=0):
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


DEBUG = []
def inner(real):
    def compile(gm, inputs, **options):
        moved(gm, inputs, CARD)
        from torch._inductor import async_compile, graph, config
        from torch._inductor.codecache import PyCodeCache
        modules = []
        def load(key, path, *a, **k):
            m = real_load(key, path, *a, **k)
            DEBUG.append(open(path).read())
            m.empty_strided_cuda, m.reinterpret_tensor = empty, reinterpret
            m.assert_size_stride = m.assert_alignment = m.get_raw_stream = lambda *a: 0
            if hasattr(m,"copy_if_misaligned"): m.copy_if_misaligned = lambda t: t
            return m
        real_load = PyCodeCache.load_by_key_path
        try:
          with mock.patch.object(async_compile.AsyncCompile, "triton", lambda self,*a,**k: Kernel()), \
             mock.patch.object(torch._C, '_cuda_getCurrentRawStream', lambda d: 0, create=True), \
             mock.patch.object(PyCodeCache, "load_by_key_path", load), config.patch(force_disable_caches=True, compile_threads=1):
            return real(gm, inputs, **options)
        finally:
            moved(gm, inputs, GPU_DEVICE)
    return compile
