"""DeepSpeed's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from ...base.errors import SpecError
from .options import StackOptions

AccumDtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, repr=False)
class DeepSpeed(StackOptions):
    """DeepSpeed's options that change memory, by the names in its configuration, of transformers' models.

    Those of ZeRO are zero_optimization's (deepspeed/runtime/zero/config.py), in elements; the stage is the run's `zero`,
    offloading its `offload`. `overlap_comm` None is DeepSpeed's default, True at stage 3 alone; it takes a second bucket
    at stages 1 and 2. `grad_accum_dtype` is data_types', None the dtype of the weights; "fp32" sums gradients in fp32,
    at stage 1 with bf16 in another optimizer (runtime/bf16_optimizer.py), where `immediate_grad_update` of bf16 does it
    as each gradient is made. `torch_adam` steps by torch's AdamW instead of DeepSpeed's fused one.
    """

    name = "deepspeed"
    package = "deepspeed"
    families = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3")
    ties_heads = True
    own_names: ClassVar[Mapping[str, str]] = {}
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("mixed-bf16", "mixed-fp16"),
        "optimizer": ("adamw", "lion"),
        "checkpointing": (None, "full"),
        "tp": (1,),
        "pp": (1,),
        "cp": (1,),
        "ep": (1,),
        "dp_replicate": (1,),
        "lora": (None,),
        "quantization": (None,),
        "compile": (False,),
        "kernels": (None,),
        "fp8": (None,),
    }

    contiguous_gradients: bool = True
    overlap_comm: bool | None = None
    reduce_bucket_size: int = 500_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    sub_group_size: int = 1_000_000_000
    grad_accum_dtype: AccumDtype | None = None
    immediate_grad_update: bool = False
    torch_adam: bool = False

    def __post_init__(self) -> None:
        self._check_counts("reduce_bucket_size", "sub_group_size")
        self._check_choices(
            contiguous_gradients=(True, False),
            overlap_comm=(None, True, False),
            grad_accum_dtype=(None, *get_args(AccumDtype)),
            immediate_grad_update=(True, False),
            torch_adam=(True, False),
        )

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW updates in place, without temporaries."""
        return not self.torch_adam

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """bf16 weights, and an fp32 copy that the optimizer steps."""
        return {"precision": "mixed-bf16"}
