"""What a stack's options are: what they set where a run says nothing, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from ...base.errors import SpecError
from ..fields import Spec


class StackOptions(Spec):
    """A stack's options. `name` is the stack's; `allowed` the values of Training's fields that it has, where not all.

    Raises SpecError for an option that this stack has not, and names the stack that has it.
    """

    name: ClassVar[str]
    package: ClassVar[str | None]  # what simulating it imports; None: it is not simulated
    expandable_segments: bool = False  # whether its launcher sets them for the allocator
    ties_heads: ClassVar[bool] = False  # whether models whose head is the embedding are described
    counts_ends: ClassVar[bool] = False  # whether its pipelines count embedding and head as layers where they need not
    half_adapters: ClassVar[bool] = False  # whether LoRA's are in the dtype of half frozen weights, not in fp32
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]]
    undescribed: ClassVar[Mapping[str, str]] = {}  # options, or values of fields, that its code has: why not
    own_names: ClassVar[Mapping[str, str]]  # by field of Training: the stack's own option that says the same
    families: ClassVar[tuple[str, ...]]  # of models that are described; of ModelSpec.family

    def __new__(cls, *args: Any, **options: Any) -> StackOptions:
        for option in options:
            if option not in (own := [f.name for f in fields(cls)]):
                if why := cls.undescribed.get(option):
                    raise SpecError(f"{cls.name}'s {option} is not supported here: {why}")
                stacks = StackOptions.__subclasses__()
                others = [one.name for one in stacks if option in {f.name for f in fields(one)}]
                whose = f"it is an option of {' and '.join(others)}" if others else "no stack has it"
                raise SpecError(f"{cls.name} has no option {option}: {whose}; {cls.name} has "
                                f"{', '.join(own) or 'none'}")  # fmt: skip
        return super().__new__(cls)

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW updates in place, without temporaries."""
        return False

    @property
    def sums_in_fp32(self) -> bool:
        """Whether each micro-batch's half gradients are added to a buffer in fp32 that stays, whole on each rank."""
        return False

    def own_head(self, run: Any) -> bool:
        """Whether the head of `run` is a unit of FSDP2, and the embedding another; tied ones are none."""
        return False

    @property
    def keeps_head(self) -> bool:
        """Whether FSDP2 leaves a head of `own_head` gathered from forward to backward."""
        return False

    def steps_in_backward(self, run: Any) -> bool:
        """Whether each parameter of `run` is updated as soon as it has its gradient."""
        return False

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError where an option cannot go with the run's fields `given`."""

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that fields of Training take unless they were given; `given` are all fields."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the stack's name and the options as JSON-ready values."""
        return {"name": self.name, **super().to_dict()}
