"""fp8 training as torchao and Transformer Engine do it: which layers multiply in fp8, and what memory that takes.

With torchao a converted layer casts its input, weight and the gradient of its output to fp8, with scales made anew each
time, for all three products; the results are bf16. For backward it keeps what a bf16 layer keeps, and casts that again
(torchao/float8/float8_linear.py, matmul_with_hp_or_float8_args). Converted are the linear layers of blocks, without the
router and routed experts, as torchtitan's recipes have it: the head stays in bf16.

    tensorwise   one scale per tensor; FSDP2 gathers weights in fp8 (enable_fsdp_float8_all_gather)
    rowwise      one scale per row, of each operand along its own dimension; weights are gathered in bf16

Transformer Engine (TE) casts for the same three products in the layers of Megatron-LM's blocks; attention and head stay
in bf16. It keeps a layer's input for backward as it multiplies it then, in fp8 (pytorch/module/layernorm_linear.py,
linear.py), and each weight in fp8 in both layouts, cast once per step (module/base.py, get_weight_workspace).

    delayed      one scale per tensor, from the maxima of steps before: of one, Megatron-LM's --fp8-amax-history-len
    tensorwise   one scale per tensor, from its own maximum ("current scaling")
    blockwise    one scale per 128 elements, of weights per 128 x 128
    mxfp8        one scale per 32 elements
"""

from __future__ import annotations

from ...specs.model import ModelSpec
from ...specs.parameters import Linear
from ...specs.run import Training

CONVERTED = ("attention", "mlp")  # parts


def converted(spec: ModelSpec, run: Training) -> tuple[Linear, ...]:
    """Return the linear layers whose products are in fp8."""
    return tuple(each for each in spec.block_linears if each.part in CONVERTED) if run.fp8_recipe else ()


# TE: bytes per element of a weight's copies, their scales aside but for mxfp8's (a byte for 32 elements, twice).
COPIES = {"delayed": 2.0, "tensorwise": 2.0, "blockwise": 2.0, "mxfp8": 2 * (1 + 1 / 32)}


def weight_copies(spec: ModelSpec, run: Training, layers: int) -> int:
    """Return the bytes of Transformer Engine's fp8 weights on a rank with so many layers."""
    if run.fp8 or run.fp8_recipe is None:
        return 0
    elements = sum(linear.elements for linear in converted(spec, run)) * layers // spec.layers // run.tp
    return int(COPIES[run.fp8_recipe] * elements)


def gathered_less(spec: ModelSpec, run: Training, width: int) -> int:
    """Return by how many bytes FSDP2's gathered weights of all blocks are fewer than at `width` bytes each."""
    if not run.gathers_float8:
        return 0
    return (width - 1) * sum(linear.elements for linear in converted(spec, run)) // run.tp
