"""What the tower of a vision-language model keeps for backward, as a plain transformer of patches with LayerNorm."""

from __future__ import annotations

from ...specs.generic import tower_sizes
from ...specs.images import images_of
from .share import Share


def tower_activations(share: Share) -> int:
    """Return the bytes that the tower's blocks keep of the images of a micro-batch.

    A block keeps the inputs of two norms and their outputs, queries, keys, values, attention's output, and of its MLP
    what the activation function reads and returns. A tower that is frozen, as adapters on the language model leave it,
    keeps nothing.
    """
    spec, run = share.spec, share.run
    images = images_of(spec, run)
    if images is None or run.lora:
        return 0
    width, layers, inner = tower_sizes(spec.config)
    patches = run.micro_batch * images.number * images.patches
    saved_bytes = share.bytes.residual * width
    if not run.checkpointing:
        saved_bytes += share.bytes.residual * width + share.bytes.compute * (6 * width + 2 * inner)
    return patches * layers * saved_bytes
