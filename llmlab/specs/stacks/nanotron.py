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
    """nanotron's options that change memory, by the names in its configuration (src/nanotron/config). It is estimated,
    not simulated.

    `accumulate_grad_in_fp32` of `optimizer` accumulates gradients in an fp32 buffer, which is unsharded on each rank
    even with ZeRO, in addition to the 16-bit gradients of a micro-batch (optim/gradient_accumulator.py).
    `tp_recompute_allgather` of `parallelism` gathers the input of a column-parallel layer again in the backward pass
    instead of saving it. tp_mode REDUCE_SCATTER is the run's sequence_parallel, recompute_layer its
    checkpointing="full", zero_stage its `zero`, and the pipeline's schedule is "1f1b". Stages are divided by the cost
    of computing their layers and the head (models/base.py), so the head, or the loss, may have its own stage.
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
        """Whether each micro-batch's 16-bit gradients are added to a buffer in fp32."""
        return self.accumulate_grad_in_fp32

    @property
    def keeps_ddp(self) -> bool:
        """True if gradients are accumulated in 16 bits (src/nanotron/trainer.py, make_ddp)."""
        return not self.accumulate_grad_in_fp32

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Set bf16 weights with an fp32 copy, which the optimizer updates, and flash-attn's kernels, which its layers
        import."""
        return {"precision": "mixed-bf16", "attention": "flash"}

    def layers_of(self, spec: ModelSpec, stages: int) -> tuple[int, ...]:
        """Return the number of layers of each stage.

        A stage gets layers until it reaches its share of the cost (models/base.py, build_model; costs: models/llama.py,
        get_block_compute_costs), and the head is assigned in the same way. After the head, there may be a stage with
        only the loss; it is counted as an empty stage before the head's stage.

        If layers reach a share exactly, the code at c252843 adds one more layer. The authors' own jobs do not: by their
        memory, 16 layers and a head that costs as much as 4 are divided 10 + 6 (bench_final2_mfu2.csv, after_pp_fix).
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
