"""DeepSpeed's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from ...base.errors import SpecError
from .options import StackOptions

COUNTS = (
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold", "sub_group_size",
)  # fmt: skip
ZERO = (*COUNTS, "contiguous_gradients", "overlap_comm")  # options in the section zero_optimization
AccumDtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, repr=False)
class DeepSpeed(StackOptions):
    """DeepSpeed's options that change memory or time, by the names in its configuration, for transformers' models.

    The sizes for ZeRO are from zero_optimization (deepspeed/runtime/zero/config.py), in elements. The stage is the
    run's `zero`, and offloading its `offload`. `overlap_comm` overlaps communication with computation, which otherwise
    waits for it (runtime/zero/stage_1_and_2.py, average_tensor; stage3.py), and allocates a second bucket at stages 1
    and 2. None is DeepSpeed's default: True only at stage 3. `grad_accum_dtype` is from data_types; None is the dtype
    of the weights, and "fp32" accumulates gradients in fp32. At stage 1 with bf16, another optimizer does this
    (runtime/bf16_optimizer.py), and with `immediate_grad_update` of the section bf16 it adds each gradient as soon as
    it exists. `torch_adam` steps with torch's AdamW instead of DeepSpeed's fused one. round_robin_gradients is no
    option here, because it only changes which rank owns which tensors. Neither is allgather_bucket_size, which is not
    read if torch has all_gather_into_tensor.
    """

    name = "deepspeed"
    families = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3")
    ties_heads = True
    own_model = False
    own_zero = True  # runtime/zero
    own_sums = True  # runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py
    checks_gradients = True  # for overflow, or to read the norm (runtime/zero/stage3.py, step)
    names_cuda = True
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("mixed-bf16", "mixed-fp16"),
        "optimizer": ("adamw", "lion"),
        "checkpointing": (None, "full"),
        **dict.fromkeys(("tp", "pp", "cp", "ep", "dp_replicate"), (1,)),
        **dict.fromkeys(("lora", "quantization"), (None,)),
        "compile": (False,),
        "kernels": (None, "fused-norm"),
        "fp8": (None,),
        "sync_each_batch": (True,),
        "reduce_dtype": ("fp32",),
    }

    unsupported_options: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("tp", "pp"), "Megatron-DeepSpeed has it; lab.estimate bounds its memory with stack='megatron:deepspeed=true'"
    )

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
        for name in COUNTS:  # DeepSpeed's JSON has 5e8
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, int(value))
        self._check_counts(*COUNTS)
        super().__post_init__()

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the sections of DeepSpeed's configuration for the options that differ from its defaults."""
        changed = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        zero = {name: value for name, value in changed.items() if name in ZERO}
        return {
            **({"zero_optimization": zero} if zero else {}),
            **({"bf16": {"immediate_grad_update": True}} if self.immediate_grad_update else {}),
            **({"data_types": {"grad_accum_dtype": self.grad_accum_dtype}} if self.grad_accum_dtype else {}),
        }

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError if an option contradicts the run's fields `given`."""
        half, zero, wide = given["precision"].rpartition("-")[2], given["zero"], self.grad_accum_dtype == "fp32"
        if self.grad_accum_dtype not in (None, "fp32", half):
            option = f"grad_accum_dtype={self.grad_accum_dtype!r} with precision={given['precision']!r}"
            raise SpecError(f"{option}: DeepSpeed sums in the dtype of the weights, or in fp32")
        if wide and (given["offload"] or zero == 0 or (zero == 1 and half == "fp16")):
            option = f"grad_accum_dtype='fp32' with zero={zero}, offload={given['offload']!r}"
            raise SpecError(f"{option}, precision={given['precision']!r} is not supported here; give zero=2 or 3, or "
                            "leave it out")  # fmt: skip
        if zero == 0 and (self.torch_adam or given["optimizer"] != "adamw"):
            option = "torch_adam=True" if self.torch_adam else f"optimizer={given['optimizer']!r}"
            raise SpecError(f"{option} with zero=0 is not supported here; give zero >= 1")
        if self.immediate_grad_update and not (zero == 1 and half == "bf16" and wide):
            raise SpecError("immediate_grad_update=True needs zero=1, bf16 and grad_accum_dtype='fp32'; "
                            "give these, or leave it out")  # fmt: skip

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW updates in place, without temporaries."""
        return not self.torch_adam

    def overlap(self, run: Any) -> tuple[str, ...]:
        """Return ("data",) if `overlap_comm` overlaps communication with computation; by default, only at stage 3."""
        enabled = self.overlap_comm
        return ("data",) * (run.zero == 3 if enabled is None else enabled and run.zero > 0)

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Set bf16 weights with an fp32 copy, which the optimizer updates."""
        return {"precision": "mixed-bf16"}
