"""Workspaces: what kernels allocate besides their outputs, a function per kernel; to import this registers them all."""

from . import (  # noqa: F401
    attention,
    bitsandbytes,
    copies,
    embedding,
    indexing,
    libraries,
    loss,
    matmul,
    normalization,
    onednn,
    reductions,
    sorting,
)
