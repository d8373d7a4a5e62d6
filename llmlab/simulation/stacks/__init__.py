"""Other stacks' own code on fake tensors: their models, what cuts them up, their loss and optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec

from ...base.compat import KNOWN, check, project_of
from ...base.errors import NotAvailable
from ...specs.model import ModelSpec
from ...specs.run import Training, stack_of
from ...step.step import Step

Build = Callable[..., Step]


def builder(spec: ModelSpec, run: Training) -> Build:
    """Return what builds the step of `run` with its stack's own code, in the module here that has the stack's name; its
    package is imported now, for real.

    Raises NotAvailable for an option that is not simulated, and without the package.
    """
    stack = stack_of(run)
    if not stack.has_package:
        raise NotAvailable(f"stack={stack.name!r} is not simulated; ask lab.estimate")
    version, project = KNOWN[stack.name][1], project_of(stack.name)
    how = f"pip install {project}=={version}"
    if stack.name != "deepspeed":  # which is among the constraints
        how += ", or in a checkout of llmlab `make stacks` and PYTHONPATH=_build/stacks"
    if find_spec(stack.name) is None:
        raise NotAvailable(f"simulating stack={stack.name!r} needs {project} {version}: {how}")
    installed = metadata.version(project)
    if installed != version:
        is_installed = f"{installed} is installed"
        raise NotAvailable(f"simulating stack={stack.name!r} is tested with {version}, and {is_installed}: {how}")
    own = import_module(f"{__name__}.{stack.name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are not installed, as they are imported
        check(stack.name)
        own.check(spec, run)
    return own.build
