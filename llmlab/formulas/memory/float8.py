"""fp8 training as torchao and Transformer Engine do it: which layers multiply in fp8, and what memory that takes.

With torchao a converted layer casts its input, weight and the gradient of its output to fp8, with scales made anew each
time, for all three products; the results are bf16. Its autograd function saves the bf16 input and casts it again in the
backward pass (torchao/float8/float8_linear.py, matmul_with_hp_or_float8_args). Compiled, the input is computed again,
too (activations.py, casts_again). Converted are the linear layers of blocks, without the router and routed experts, as
torchtitan's recipes have it: the head stays in bf16.

    tensorwise   one scale per tensor; FSDP2 gathers weights in fp8 (enable_fsdp_float8_all_gather)
    rowwise      one scale per row, of each operand along its own dimension; weights are gathered in bf16

Transformer Engine (TE) casts for the same three products in the layers of Megatron-LM's blocks, routed experts
included; attention, router and head stay in bf16. It keeps a layer's input for backward as it multiplies it then, in
fp8 (pytorch/module/layernorm_linear.py, linear.py), and each weight in fp8 beside the half one, cast once per step
(module/base.py, get_weight_workspace), or, with Megatron-LM's --fp8-param-gather, instead of it (module/base.py,
reset_parameters; NeMo's fp8_params).

    delayed      one scale per tensor, from the maxima of steps before: of one, Megatron-LM's --fp8-amax-history-len
    tensorwise   one scale per tensor, from its own maximum ("current scaling")
    blockwise    one scale per 128 elements, of weights per 128 x 128
    mxfp8        one scale per 32 elements

Backward multiplies weights along their other dimension. Hopper's fp8 products take rows alone, so that each weight is
there twice, as it is and transposed (pytorch/csrc/quantizer.cpp; TE 1.9, module/linear.py, caches that from a step's
first micro-batch on). Blackwell's take both (pytorch/utils.py, is_non_tn_fp8_gemm_supported): one is enough, unless
scales belong to rows and columns.
"""

from __future__ import annotations

from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.parameters import Linear
from ...specs.run import Training

CONVERTED = ("attention", "mlp")  # parts


def converted(spec: ModelSpec, run: Training) -> tuple[Linear, ...]:
    """Return the linear layers whose products are in fp8."""
    return tuple(linear for linear in spec.block_linears if linear.part in CONVERTED) if run.fp8_recipe else ()


# TE: bytes per element in fp8 in one layout, scales included: of weights, whose blocks of 128 x 128 have a scale in
# fp32, and of activations, whose blocks are 1 x 128; mxfp8 has a byte for 32 elements of both.
WEIGHT = {"delayed": 1.0, "tensorwise": 1.0, "blockwise": 1 + 4 / 128**2, "mxfp8": 1 + 1 / 32}
ACTIVATION = {"delayed": 1.0, "tensorwise": 1.0, "blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}


def takes_either_layout(gpu: GPU | None) -> bool:
    """Whether fp8 products of one scale per tensor take a matrix along either dimension, so that nothing is transposed
    (is_non_tn_fp8_gemm_supported); without a GPU as Hopper has it."""
    capability = gpu.compute_capability if gpu else None
    return capability is not None and ((10, 0) <= capability < (12, 0) or capability >= (13, 0))


def layouts(recipe: str, gpu: GPU | None) -> int:
    """Return in how many layouts Transformer Engine keeps a weight in fp8; without a GPU as Hopper has it."""
    return 1 if takes_either_layout(gpu) and recipe in ("delayed", "tensorwise") else 2


def weights_in_fp8(spec: ModelSpec, run: Training, layers: int, gpu: GPU | None) -> int:
    """Return the bytes of Transformer Engine's fp8 weights on a rank with so many layers, less those of the half ones
    that they stand for."""
    if run.fp8 or run.fp8_recipe is None:
        return 0
    elements = _elements(spec, run, layers)
    instead = 2 * elements if run.fp8_param_gather else 0
    return int(layouts(run.fp8_recipe, gpu) * WEIGHT[run.fp8_recipe] * elements) - instead


def gathered_less(spec: ModelSpec, run: Training, width: int, layers: int) -> int:
    """Return by how many bytes the gathered weights of so many layers are fewer than at `width` bytes each."""
    return (width - 1) * _elements(spec, run, layers) if run.gathers_float8 else 0


def _elements(spec: ModelSpec, run: Training, layers: int) -> int:
    """Return a rank's elements of the converted weights of so many layers, with those of experts if TE converts
    them."""
    dense = sum(linear.elements for linear in converted(spec, run)) // run.tp
    experts = 0 if run.fp8 else spec.parameters_by_component["experts"] // (run.expert_tp * run.ep)
    return (dense + experts) * layers // spec.layers
