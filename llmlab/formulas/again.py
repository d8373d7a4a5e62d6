"""What backward computes again: how many blocks, and of them all or parts.

    "full"        whole blocks: all, but of Megatron-LM's recompute_method="block"; of "uniform" however many it keeps
                  one input of
    "selective"   of all blocks what is not kept; torchtitan's "selective_layers" one of `every` blocks, whole
                  (torchtitan/distributed/activation_checkpoint.py, _apply_layer_sac), Megatron-LM's the modules that
                  recompute_modules names (transformer_layer.py, attention.py)
"""

from __future__ import annotations

from ..specs.model import ModelSpec
from ..specs.run import Training, stack_of
from ..specs.stages import layers_of


def blocks_again(spec: ModelSpec, run: Training) -> int:
    """Return of how many blocks backward computes something again."""
    if run.checkpointing is None:
        return 0
    return sum(stack_of(run).blocks_again(run, layers) for layers in layers_of(spec, run))


def whole_blocks_again(spec: ModelSpec, run: Training) -> int:
    """Return how many blocks backward computes again from end to end."""
    return blocks_again(spec, run) if run.checkpointing == "full" or stack_of(run).recomputes_one_in else 0


def share_again(spec: ModelSpec, run: Training) -> float:
    """Return the share of the blocks of which backward computes something again."""
    return blocks_again(spec, run) / spec.layers


def whole_again(spec: ModelSpec, run: Training) -> float:
    """Return the share of the blocks that backward computes again from end to end."""
    return whole_blocks_again(spec, run) / spec.layers


def module_again(run: Training, module: str) -> bool:
    """Whether "selective" of Megatron-LM computes `module` of every block again, "core_attn" or "mlp"."""
    return run.checkpointing == "selective" and module in stack_of(run).recompute_modules


def attentions_again(spec: ModelSpec, run: Training, fused: bool) -> int:
    """Return in how many blocks backward computes attention's scores again, beside what a `fused` kernel does within
    its backward pass. "selective" keeps what such a kernel returned, where its list has that; Megatron-LM runs the
    module that it names, whatever computes it."""
    if whole := whole_blocks_again(spec, run):
        return whole
    stack = stack_of(run)
    if run.checkpointing != "selective" or stack.recomputes_one_in:
        return 0
    if stack.recompute_modules:
        return spec.layers if module_again(run, "core_attn") else 0
    return 0 if fused and stack.keeps_attention else spec.layers
