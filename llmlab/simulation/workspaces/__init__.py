"""Workspaces: the memory that kernels allocate in addition to their outputs. Importing this package registers them.

To add one:

1. Read the C++ file, and follow every at::empty, .contiguous(), .to() and allocate in order. If the operator allocates
   only its outputs, add it to none.py, in the entry of its C++ file.
2. Otherwise write a function in the file of its kind, under `@workspace(aten.OPERATOR, source=FILE)`. Yield the bytes
   of each buffer, `FREE` where the operator frees the last one, and `OUTPUTS` where it allocates its outputs. The
   operator's arguments are attributes of `op`.
3. Add a row to tests/simulation/test_workspaces.py: the operator, its arguments, and the expected bytes, computed
   from their shapes.
"""

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
