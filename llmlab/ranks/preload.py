"""What the server imports from which ranks are forked: once for all of them, where each would take seconds of a core.

None of it uses a GPU: a process that is forked from one that does cannot.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # threads that a library starts when it is loaded are not forked

import torch
import torch.distributed.fsdp  # noqa: F401

torch.compiler.reset()  # imports the compiler, as torch's optimizers do
