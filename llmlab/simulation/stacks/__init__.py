"""Other stacks' own code on fake tensors: their models, what cuts them up, their loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec

import torch
from torch import Tensor

from ...base.errors import NotAvailable
from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stacks import StackOptions
from ...step.model import Around
from ...step.step import Step

# By stack: the module that builds its step, and the version whose code that module calls.
BUILDERS = {"torchtitan": ("torchtitan", "0.2.2")}
Build = Callable[[ModelSpec, Training, torch.device, list[Tensor], Around], Step]


def builder(spec: ModelSpec, run: Training) -> Build:
    """Return what builds the step of `run` with its stack's own code, whose package is imported here, for real.

    Raises NotAvailable for a stack or an option that is not simulated, and without the package.
    """
    stack = run.stack
    assert isinstance(stack, StackOptions)
    if stack.name not in BUILDERS:
        why = f"simulate has no stack={stack.name!r}"
        raise NotAvailable(f"{why}; see lab.estimate, or run a script of {stack.name}'s under llmlab run")
    module, version = BUILDERS[stack.name]
    how = f"in a checkout of llmlab `make stacks`, then PYTHONPATH=_build/stacks; or pip install {module}=={version}"
    if find_spec(stack.package) is None:
        raise NotAvailable(f"simulating stack={stack.name!r} needs {stack.package} {version}: {how}")
    found = metadata.version(stack.package)
    if found != version:
        raise NotAvailable(f"simulating stack={stack.name!r} is known of {version}, and {found} is installed: {how}")
    own = import_module(f"{__name__}.{module}")
    own.check(spec, run)
    return own.build
