"""What backward computes again: how many blocks, and of them all or parts.

    "full"        whole blocks: all; of Megatron-LM's recompute_method="block" the first recompute_num_layers of each
                  virtual stage, of "uniform" all, however many it keeps one input of
                  (megatron/core/transformer/transformer_block.py, _checkpointed_forward)
    "selective"   of all blocks what is not kept; torchtitan's "selective_layers" one of `every` blocks, whole
                  (torchtitan/distributed/activation_checkpoint.py, _apply_layer_sac), Megatron-LM's the modules that
                  recompute_modules names (transformer_layer.py, attention.py)
"""

from __future__ import annotations

from ..specs.model import ModelSpec
from ..specs.run import Training
from ..specs.stacks import Megatron, Torchtitan
from ..specs.stages import layers_of


def blocks_again(spec: ModelSpec, run: Training) -> int:
    """Return of how many blocks backward computes something again."""
    if run.checkpointing is None:
        return 0
    stack = run.stack
    if isinstance(stack, Torchtitan) and stack.ac == "selective_layers":
        return sum(layers // stack.every for layers in layers_of(spec, run))
    if isinstance(stack, Megatron) and run.checkpointing == "full" and stack.recompute_method == "block":
        chunks, number = run.virtual_stages, stack.recompute_num_layers
        return sum(chunks * min(number, layers // chunks) for layers in layers_of(spec, run))
    return spec.layers


def whole_blocks_again(spec: ModelSpec, run: Training) -> int:
    """Return how many blocks backward computes again from end to end."""
    by_blocks = isinstance(run.stack, Torchtitan) and run.stack.ac == "selective_layers"
    return blocks_again(spec, run) if run.checkpointing == "full" or by_blocks else 0


def share_again(spec: ModelSpec, run: Training) -> float:
    """Return the share of the blocks of which backward computes something again."""
    return blocks_again(spec, run) / spec.layers


def whole_again(spec: ModelSpec, run: Training) -> float:
    """Return the share of the blocks that backward computes again from end to end."""
    return whole_blocks_again(spec, run) / spec.layers


def module_again(run: Training, module: str) -> bool:
    """Whether "selective" of Megatron-LM computes `module` of every block again, "core_attn" or "mlp"."""
    stack = run.stack
    return isinstance(stack, Megatron) and run.checkpointing == "selective" and module in stack.recompute_modules


def attentions_again(spec: ModelSpec, run: Training, fused: bool) -> int:
    """Return in how many blocks backward computes attention's scores again, beside what a `fused` kernel does within
    its backward pass. "selective" keeps what such a kernel returned, where its list has that; Megatron-LM runs the
    module that it names, whatever computes it."""
    if whole := whole_blocks_again(spec, run):
        return whole
    if run.checkpointing != "selective" or (isinstance(run.stack, Torchtitan) and run.stack.ac == "selective_layers"):
        return 0
    if isinstance(run.stack, Megatron):
        return spec.layers if module_again(run, "core_attn") else 0
    return 0 if fused and getattr(run.stack, "keeps_attention", True) else spec.layers
