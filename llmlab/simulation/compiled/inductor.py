"""Inductor on the simulated card: it writes its wrapper, which runs here with kernels that do nothing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...base.compat import DisableTorchFunction
from ..devices import GPU_DEVICE

CARD = torch.device("cuda", 0)


def named_cuda(gm):
    def swap(value):
        return CARD if value == GPU_DEVICE and isinstance(value, torch.device) else value
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.args = torch.fx.node.map_aggregate(node.args, swap)
                node.kwargs = torch.fx.node.map_aggregate(node.kwargs, swap)


class Kernel:
    def run(self, *args, **kwargs): pass


def empty(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype, device=GPU_DEVICE)


def reinterpret(tensor, size, stride, offset=0):
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


DEBUG = []
def inner(real, tracing):
    def compile(gm, inputs, **options):
        named_cuda(gm)
        from torch._inductor import async_compile, graph, config
        from torch._inductor.codecache import PyCodeCache
        def load(key, path, *a, **k):
            m = real_load(key, path, *a, **k)
            DEBUG.append(open(path).read())
            m.empty_strided_cuda, m.reinterpret_tensor = empty, reinterpret
            m.assert_size_stride = m.assert_alignment = m.get_raw_stream = lambda *a: 0
            if hasattr(m,"copy_if_misaligned"): m.copy_if_misaligned = lambda t: t
            return m
        real_load = PyCodeCache.load_by_key_path
        with tracing(), DisableTorchFunction(), mock.patch.object(async_compile.AsyncCompile, "triton", lambda self,*a,**k: Kernel()), \
             mock.patch.object(torch._C, '_cuda_getCurrentRawStream', lambda d: 0, create=True), \
             mock.patch.object(PyCodeCache, "load_by_key_path", load), config.patch(force_disable_caches=True, compile_threads=1):
            return real(gm, inputs, **options)
    return compile
