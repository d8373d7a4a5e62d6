"""Ask torch.distributed._tools' MemTracker: the real step on fake tensors, and the peak of the tensors' bytes.

It needs no card: its documentation runs it under FakeTensorMode, here with CPU tensors, since a PyTorch without CUDA
has no others. It has no allocator, so nothing is rounded or reserved.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

from llmlab import ModelSpec, Training


@contextmanager
def frozen_allowed() -> Iterator[None]:
    """Let MemTracker see frozen parameters: it puts a hook for gradients on each, which torch 2.13 refuses.

    Without this it fails on every LoRA step.
    """
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    def where_trained(register: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, hook: register(tensor, hook) if tensor.requires_grad else RemovableHandle(OrderedDict())

    with (
        mock.patch.object(Tensor, "register_hook", where_trained(Tensor.register_hook)),
        mock.patch.object(
            Tensor, "register_post_accumulate_grad_hook", where_trained(Tensor.register_post_accumulate_grad_hook)
        ),
    ):
        yield


def whole_model_only(tracker: Any) -> Any:
    """Return `tracker` without its peaks by module: it copies those at every operator, minutes per step with LoRA."""

    def update(peak_state: Any) -> None:
        for device, held in tracker._curr_mem_snap.items():
            if tracker._peak_mem.get(device, 0) < held["Total"]:
                tracker._peak_mem[device], tracker._peak_mem_snap[device] = held["Total"], dict(held)

    tracker._update_peak_stats = update
    return tracker


@cache
def mem_tracker_peak(spec: ModelSpec, run: Training) -> int | None:
    """Return the bytes of its "peak" snapshot over two steps; None for NF4.

    bitsandbytes' parameter, Params4bit, is a subclass of the tensor it is made from, which a fake tensor refuses.
    """
    if run.quantization is not None:
        return None
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from llmlab.simulation.patching.patches import fake_parameters
    from llmlab.step.step import build_step

    if run.attention == "efficient":  # a kernel of CUDA's; the tracker runs the step on fake tensors of the CPU
        run = replace(run, attention="sdpa")
    with frozen_allowed(), FakeTensorMode(allow_non_fake_inputs=True):
        ids = [torch.zeros(run.micro_batch, run.seq_len, dtype=torch.int64)] * run.accumulation
        with fake_parameters():
            step = build_step(spec, run, "cpu", ids)
        tracker = whole_model_only(MemTracker())
        tracker.track_external(step.model, step.optimizer, *step.inputs)
        with tracker:
            for _ in range(2):
                step()
                tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    gc.collect()
    return sum(device["Total"] for device in peak.values())
