"""transformers' classes, whose options are the run's own fields."""

from __future__ import annotations

from dataclasses import dataclass

from .options import StackOptions


@dataclass(frozen=True, repr=False)
class Transformers(StackOptions):
    """The stack "transformers": its model classes in llmlab's own steps (step), with torch's engines, or with
    DeepSpeed's if the fields `zero` and `offload` ask for it. It has no options."""

    name = "transformers"
    has_package = False
    own_program = False
    own_model = False
    ties_heads = True
    reshards_model = True  # fully_shard of the whole model, which returns the loss
