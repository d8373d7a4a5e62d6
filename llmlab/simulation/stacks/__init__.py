"""The code of other stacks on fake tensors: their models, sharding, losses and optimizers."""

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
    """Return the function that builds the step of `run` with the code of its stack, from the module here with the name
    of the stack; the stack's package is really imported now.

    Raises NotAvailable for an option that is not simulated, and if the package is missing.
    """
    stack = stack_of(run)
    if not stack.has_package:
        raise NotAvailable(f"stack={stack.name!r} is not simulated; ask lab.estimate")
    version, project = KNOWN[stack.name][1], project_of(stack.name)
    how = f"pip install {project}=={version}"
    if stack.name != "deepspeed":  # DeepSpeed is in constraints.txt
        how += ", or in a checkout of llmlab `make stacks` and PYTHONPATH=_build/stacks"
    if find_spec(stack.name) is None:
        raise NotAvailable(f"simulating stack={stack.name!r} needs {project} {version}: {how}")
    installed = metadata.version(project)
    if installed != version:
        is_installed = f"{installed} is installed"
        raise NotAvailable(f"simulating stack={stack.name!r} is tested with {version}, and {is_installed}: {how}")
    module = import_module(f"{__name__}.{stack.name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing packages, during the import
        check(stack.name)
        module.check(spec, run)
    return module.build
