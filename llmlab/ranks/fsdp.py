"""FSDP2's units of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def shard_units(model: nn.Module, blocks: Iterable[nn.Module], **arguments: Any) -> None:
    """Make each of `blocks` a unit of FSDP2, gathered and freed as a whole; all other parameters are one more."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)
