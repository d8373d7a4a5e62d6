"""What the backward pass recomputes: how many blocks, whole or in part.

    "full"        whole blocks: all of them, except with Megatron-LM's recompute_method="block", which recomputes some
    "selective"   in every block the tensors that are not saved. torchtitan's "selective_layers" recomputes every n-th
                  block, whole (torchtitan/distributed/activation_checkpoint.py, _apply_layer_sac), and Megatron-LM the
                  modules in recompute_modules (transformer_layer.py, attention.py)
"""

from __future__ import annotations

from ..specs.model import ModelSpec
from ..specs.run import Training, stack_of
from ..specs.stages import layers_of


def recomputed_blocks(spec: ModelSpec, run: Training) -> int:
    """Return the number of blocks that the backward pass recomputes at least in part."""
    if run.checkpointing is None:
        return 0
    return sum(stack_of(run).recomputed_blocks(run, layers) for layers in layers_of(spec, run))


def wholly_recomputed_blocks(spec: ModelSpec, run: Training) -> int:
    """Return the number of blocks that the backward pass recomputes as a whole."""
    return recomputed_blocks(spec, run) if run.checkpointing == "full" or stack_of(run).recomputes_one_in else 0


def share_again(spec: ModelSpec, run: Training) -> float:
    """Return the fraction of the blocks that the backward pass recomputes at least in part."""
    return recomputed_blocks(spec, run) / spec.layers


def whole_again(spec: ModelSpec, run: Training) -> float:
    """Return the fraction of the blocks that the backward pass recomputes as a whole."""
    return wholly_recomputed_blocks(spec, run) / spec.layers


def module_again(run: Training, module: str) -> bool:
    """Whether Megatron-LM's "selective" recomputes `module` of every block (`Megatron.recompute_modules`)."""
    return run.checkpointing == "selective" and module in stack_of(run).recompute_modules


def attentions_again(spec: ModelSpec, run: Training, fused: bool) -> int:
    """Return the number of blocks in which checkpointing recomputes attention scores, in addition to the recomputation
    inside the backward pass of a `fused` kernel. "selective" saves the output of such a kernel if its list contains it.
    Megatron-LM recomputes the module, whichever kernel runs in it."""
    if whole := wholly_recomputed_blocks(spec, run):
        return whole
    stack = stack_of(run)
    if run.checkpointing != "selective" or stack.recomputes_one_in:
        return 0
    if stack.recompute_modules:
        return spec.layers if module_again(run, "core_attn") else 0
    return 0 if fused and stack.keeps_attention else spec.layers
