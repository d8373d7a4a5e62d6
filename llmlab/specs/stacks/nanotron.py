"""nanotron's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from .options import StackOptions

if TYPE_CHECKING:
    from ..model import ModelSpec


@dataclass(frozen=True, repr=False)
class Nanotron(StackOptions):
    """nanotron's options that change memory, by the names of its configuration (src/nanotron/config); it is estimated,
    not simulated.

    `accumulate_grad_in_fp32` of `optimizer` sums gradients in a buffer of fp32, whole on each rank with ZeRO too,
    beside the half ones of a micro-batch (optim/gradient_accumulator.py). `tp_recompute_allgather` of `parallelism`
    gathers again in backward what a column-parallel layer was given, instead of keeping it. tp_mode REDUCE_SCATTER is
    the run's sequence_parallel, recompute_layer its checkpointing="full", zero_stage its `zero`, and the order of a
    pipeline "1f1b". Stages are cut by what their layers cost to compute, the head among them (models/base.py), which
    may leave the head, or the loss, a stage of its own.
    """

    name = "nanotron"
    has_package = False
    families = ("llama",)
    copies_gathered = True  # distributed.py, all_gather_coalesced
    ties_heads = True
    fused_adamw = True  # torch_adam_is_fused
    dtensors = False  # parallel/tensor_parallel/nn.py
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("mixed-bf16",),
        "optimizer": ("adamw",),
        "checkpointing": (None, "full"),
        "attention": ("flash",),
        **dict.fromkeys(("lora", "quantization"), (None,)),
        "zero": (0, 1),
        **dict.fromkeys(("cp", "ep", "dp_replicate"), (1,)),
        "schedule": ("1f1b",),
        "virtual_stages": (1,),
        "loss_parallel": (True,),
        "offload": (None,),
        "compile": (False,),
        "kernels": (None,),
        "fp8": (None,),
        "sync_each_batch": (True,),
        "reduce_dtype": ("fp32",),
    }

    accumulate_grad_in_fp32: bool = True
    tp_recompute_allgather: bool = True

    @property
    def sums_in_fp32(self) -> bool:
        """Whether each micro-batch's half gradients are added to a buffer in fp32."""
        return self.accumulate_grad_in_fp32

    @property
    def keeps_ddp(self) -> bool:
        """Where it sums in half (src/nanotron/trainer.py, make_ddp)."""
        return not self.accumulate_grad_in_fp32

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """bf16 weights, whose fp32 copy is stepped, and flash-attn's kernels, which its layers import."""
        return {"precision": "mixed-bf16", "attention": "flash"}

    def layers_of(self, spec: ModelSpec, stages: int) -> tuple[int, ...]:
        """Return how many layers each of `stages` has. A stage takes layers until it has computed its share (models/
        base.py, build_model; costs: models/llama.py, get_block_compute_costs), and the head likewise: after it there
        may be a stage for the loss alone, which is counted as one without work before the head's.

        Where layers meet a share exactly, the code at c252843 takes one more. The authors' own jobs do not: by their
        memory, 16 layers and a head that costs as much as 4 are cut 10 + 6 (bench_final2_mfu2.csv, after_pp_fix).
        """
        layer = 4 * spec.query_width * spec.hidden + 3 * spec.intermediate * spec.hidden
        costs = list(accumulate([layer] * spec.layers))
        whole = costs[-1] + spec.vocab * spec.hidden
        counts = [0] * stages
        stage = 0
        for cost in costs:
            counts[stage] += 1
            stage += cost * stages >= whole * (stage + 1)
        if stage == stages - 2:
            counts[stage:] = [0, counts[stage]]
        return tuple(counts)
