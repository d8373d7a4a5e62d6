"""Kernels of a Llama, each in numbered rungs; importing this package imports neither torch nor Triton.

    0  naive PyTorch     every line of the formula is a kernel of its own
    1  better PyTorch    PyTorch's fused operator, or a better order of its operators
    2  torch.compile     rung 0, fused by Inductor
    3  Triton            the forward pass is one kernel; backward in PyTorch
    4  Triton, fused     forward and backward, one autograd.Function

    from llmlab import kernels
    y = kernels.rms_norm(x, weight, eps=1e-5)            # the best rung that runs here: 4 on CUDA with Triton, else 1
    y = kernels.rms_norm(x, weight, eps=1e-5, rung=3)    # this one, or NotAvailable with the reason

The code is in `kernels/ladder`, one file per kernel. Rungs 3 and 4 also run on a CPU, slowly, in a process that was
started with TRITON_INTERPRET=1. The tests use this mode. `python -m llmlab.course.kernels.ptx` compiles them for GPUs
that this machine lacks. `rms_norm.cu` and `cuda` are one kernel in CUDA C++.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ladder.attention import attention
    from .ladder.cross_entropy import cross_entropy
    from .ladder.linear_cross_entropy import linear_cross_entropy
    from .ladder.rms_norm import rms_norm
    from .ladder.rope import rope
    from .ladder.softmax import softmax
    from .ladder.swiglu import swiglu

__all__ = ["softmax", "rms_norm", "swiglu", "rope", "cross_entropy", "linear_cross_entropy", "attention"]


if not TYPE_CHECKING:  # type checkers read the imports above, and so find a misspelt name

    def __getattr__(name: str) -> Any:
        if name in __all__:  # the files are in a subpackage: importing kernels/softmax.py would set `kernels.softmax`
            return getattr(import_module(f".ladder.{name}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
