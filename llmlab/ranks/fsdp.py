"""FSDP2's units of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def shard_units(model: nn.Module, blocks: Iterable[nn.Module], **arguments: Any) -> None:
    """Make FSDP2's units, which are gathered and freed as a whole: each of `blocks`, and what is outside of them."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)
