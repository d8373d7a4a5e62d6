"""A linear layer in GPTQ's 4 bits as AutoGPTQ 0.7.1 trains adapters over it: what it stores, makes and moves.

auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, QuantLinear: the layer of checkpoints without act-order where
exllama's kernels, which have no backward pass, are off. Of 128 tokens or more, and of any number where AutoGPTQ itself
loads it to be trained, operators of PyTorch unpack the weight, and torch.matmul reads what they made:

    words >> shifts    eight int32 of each int32     4 + ½ bytes moved per weight
    to int8                                          4 + 1
    & 15                                             1 + 1
    - zeros            one of a group's              1 + 1
    · scales           one of a group's              1 + the bytes of a weight, in the scales' dtype

The zeros are unpacked alike, and one is added to each. No gradient goes through any of it, but autograd keeps the
result for the gradient of the layer's input, as it does a weight: it is unpacked once in forward, and once more where a
block is recomputed. Its successor, GPT-QModel, has Inductor make one kernel of the same operators
(gptqmodel/nn_modules/qlinear/torch.py, optimize): that is not described.

    width  bytes of what the checkpoint's halves were loaded as; compute  bytes of what products read
"""

from __future__ import annotations

from ..base.terms import GPTQ_GROUP


def tensors(inputs: int, outputs: int, width: int) -> tuple[int, int, int, int]:
    """Return the bytes of a layer's qweight, qzeros, scales and g_idx.

    >>> sum(tensors(4096, 4096, 2)) * 8 / 4096**2  # bits per weight
    4.1640625
    """
    groups = -(-inputs // GPTQ_GROUP)
    return inputs * outputs // 2, groups * outputs // 2, width * groups * outputs, 4 * inputs


def highest(width: int, compute: int) -> int:
    """Return the bytes per weight at the highest moment before its product: int32 and int8 of it; int8 without zeros
    and with, and the result; or that and autocast's copy.

    >>> highest(2, 2), highest(4, 2)
    (5, 6)
    """
    return max(4 + 1, 1 + 1 + width, read(width, compute))


def read(width: int, compute: int) -> int:
    """Return the bytes per weight that are there while it is multiplied: the result has a name until the layer returns,
    and autocast's copy is beside it."""
    return width + (compute if compute != width else 0)


def moved(inputs: int, outputs: int, width: int, compute: int) -> tuple[float, float]:
    """Return the bytes that unpacking a weight moves: by shifts, which read words in steps of no bytes (expand), and by
    all other operators, autocast's copy among them."""
    weights = inputs * outputs
    zeros = weights / GPTQ_GROUP
    copied = width + compute if compute != width else 0
    per_weight = (4 + 1) + (1 + 1) + (1 + 1) + (1 + width) + copied
    of_group = (4 + 1) + (1 + 1) + (1 + 1) + 1 + width  # to int8, & 15, plus one; read by - and ·
    return (0.5 + 4) * (weights + zeros), per_weight * weights + of_group * zeros
