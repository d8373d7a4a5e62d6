"""Workspaces: the memory that kernels allocate in addition to their outputs. Importing this package registers them."""

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
