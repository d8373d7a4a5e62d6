"""Bytes per element, by precision and by optimizer: the table behind "how many bytes does a parameter take?".

>>> [bytes_per_parameter(p) for p in ("fp32", "autocast-bf16", "mixed-bf16", "bf16")]
[16.0, 16.0, 16.0, 8.0]
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bytes:
    """Bytes of one element of each kind of tensor in one precision."""

    weights: int
    gradients: int
    states: int  # of each optimizer state
    master: int  # of the fp32 copy the optimizer steps; 0 where the weights themselves are stepped
    residual: int  # activations between blocks, and what the norms see
    compute: int  # operands of the matrix products


# Micikevicius et al., arXiv 1710.03740 (master copy); ZeRO, arXiv 1910.02054, section 3.1 (2 + 2 + K = 12);
# torch.autocast keeps fp32 parameters and casts the operands of matrix products.
PRECISION = {
    "fp32": Bytes(4, 4, 4, 0, 4, 4),
    "fp16": Bytes(2, 2, 2, 0, 2, 2),
    "bf16": Bytes(2, 2, 2, 0, 2, 2),
    "autocast-fp16": Bytes(4, 4, 4, 0, 4, 2),
    "autocast-bf16": Bytes(4, 4, 4, 0, 4, 2),
    "mixed-fp16": Bytes(2, 2, 4, 4, 2, 2),
    "mixed-bf16": Bytes(2, 2, 4, 4, 2, 2),
}

NF4_BLOCK = 64  # weights that share one fp32 scale (QLoRA, arXiv 2305.14314, section 3)
DOUBLE_BLOCK = 256  # scales of one byte that share one of fp32: double quantization (the same)
STATE8_BLOCK = 256  # elements that share one fp32 scale (bitsandbytes optim/optimizer.py, blockwise)


def weight_bytes(dtype: str, elements: int, rows: int) -> int:
    """Return the bytes of `elements` weights stored in `dtype`; int8 keeps one fp32 scale per row, of `rows` rows;
    "nf4-double" is nf4 with `double_quant`."""
    if dtype == "nf4":
        return -(-elements // 2) + 4 * -(-elements // NF4_BLOCK)
    if dtype == "nf4-double":
        scales = -(-elements // NF4_BLOCK)
        return -(-elements // 2) + scales + 4 * -(-scales // DOUBLE_BLOCK)
    if dtype == "int8":
        return elements + 4 * rows
    return elements * {"fp32": 4, "fp16": 2, "bf16": 2}[dtype]


def state_bytes(optimizer: str, state: int, parameters: int, factored: int) -> int:
    """Return the bytes of an optimizer's states for `parameters` trained parameters.

    `state` is the bytes of one state element; `factored` the rows + columns of every matrix (plus every vector), which
    is all that Adafactor keeps (arXiv 1804.04235, section 3), or the elements of Muon's matrices, which have a momentum
    alone where AdamW's have two moments (torch/optim/_muon.py). adamw keeps two moments (1711.05101), fused or not;
    lion one (2302.06675), which bitsandbytes has in fp32 whatever it steps (optim/optimizer.py,
    Optimizer1State.init_state); adamw-8bit two of one byte with an fp32 scale per block (2110.02861, section 2.1); sgd,
    without momentum, none.
    """
    if optimizer in ("adamw", "adamw-fused"):
        return 2 * state * parameters
    if optimizer == "adamw-8bit":
        return 2 * (parameters + 4 * -(-parameters // STATE8_BLOCK))
    if optimizer == "lion":
        return 4 * parameters
    if optimizer == "muon":
        return state * (2 * parameters - factored)
    return state * factored if optimizer == "adafactor" else 0


def bytes_per_parameter(precision: str, optimizer: str = "adamw") -> float:
    """Return weights + gradient + states + master copy in bytes per parameter, before activations; with
    Muon of a matrix in a block."""
    b = PRECISION[precision]
    many = 1 << 20  # so many parameters that all blocks are full, and each scale is shared by a whole one
    return (
        b.weights
        + b.gradients
        + b.master
        + state_bytes(optimizer, b.states, many, many if optimizer == "muon" else 0) / many
    )
