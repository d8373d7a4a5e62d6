"""fp8 training as torchao does it: which linear layers multiply in fp8, and what FSDP2 then gathers.

A converted layer casts its input, weight and the gradient of its output to fp8, with scales made anew each time, for
all three products; the results are bf16. For backward it keeps what a bf16 layer keeps, and casts that again
(torchao/float8/float8_linear.py, matmul_with_hp_or_float8_args). Converted are the linear layers of blocks, without the
router and routed experts, as torchtitan's recipes have it: the head stays in bf16.

    tensorwise   one scale per tensor; FSDP2 gathers weights in fp8 (enable_fsdp_float8_all_gather)
    rowwise      one scale per row, of each operand along its own dimension; weights are gathered in bf16
"""

from __future__ import annotations

from ...specs.model import ModelSpec
from ...specs.parameters import Linear
from ...specs.run import Training

CONVERTED = ("attention", "mlp")  # parts


def converted(spec: ModelSpec, run: Training) -> tuple[Linear, ...]:
    """Return the linear layers whose products are in fp8."""
    return tuple(each for each in spec.block_linears if each.part in CONVERTED) if run.fp8 else ()


def gathered_less(spec: ModelSpec, run: Training, width: int) -> int:
    """Return by how many bytes FSDP2's gathered weights of all blocks are fewer than at `width` bytes each."""
    if not run.gathers_float8:
        return 0
    return (width - 1) * sum(linear.elements for linear in converted(spec, run)) // run.tp
