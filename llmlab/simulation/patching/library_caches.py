"""Caches of torch, accelerate and transformers that remember devices: restored when a simulated card is removed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...base.compat import GLOBAL_DEVICE_CONTEXT, check


@contextmanager
def default_device() -> Iterator[None]:
    """Undo torch.set_default_device."""
    context = getattr(GLOBAL_DEVICE_CONTEXT, "device_context", None)
    try:
        yield
    finally:
        if getattr(GLOBAL_DEVICE_CONTEXT, "device_context", None) is not context:
            torch.set_default_device(context.device if context else None)


@contextmanager
def devices_found() -> Iterator[None]:
    """Let accelerate and transformers look for their devices anew, here and after the block."""
    kept = [dict(state) for state in _accelerate_states()]
    _forget()
    try:
        yield
    finally:
        _forget()
        for state, before in zip(_accelerate_states(), kept, strict=False):  # there was none before the first import
            state.update(before)


def _accelerate_states() -> list[dict[str, Any]]:
    """Return the dictionaries that all instances of accelerate's states share; none where it is not imported."""
    module = sys.modules.get("accelerate.state")
    check("accelerate.state" if module else "")
    return [module.PartialState._shared_state, module.AcceleratorState._shared_state] if module else []


def _forget() -> None:
    for state in _accelerate_states():
        state.clear()
    checks = sys.modules.get("transformers.utils.import_utils")
    for name, each in vars(checks).items() if checks else ():
        if name.startswith("is_") and hasattr(each, "cache_clear"):
            each.cache_clear()
