"""Your optimizer."""

import torch

# ---- chapter 7


def factored_step(g, state, new):
    raise NotImplementedError
