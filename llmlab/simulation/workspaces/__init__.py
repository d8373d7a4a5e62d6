"""Workspaces: the memory that kernels allocate in addition to their outputs. Importing this package registers them.

To add one:

1. This command adds a function to copies.py, and an incomplete row to tests/simulation/test_workspace_table.py:

       python tools/new_workspace.py aten.im2col --file copies --source cuda/Im2Col.cu

2. Read the C++ file, and follow every at::empty, .contiguous(), .to() and allocate in order. In the function, yield the
   bytes of each buffer, `FREE` where the operator frees the last one, and `OUTPUTS` where it allocates its outputs. The
   operator's arguments are attributes of `op`.
3. In the row, replace the arguments' names with tensors, and list the expected bytes, computed from their shapes.
4. If the operator allocates only its outputs, remove both, and add it to none.py, in the entry of its C++ file.
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
