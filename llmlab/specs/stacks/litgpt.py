"""LitGPT's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...base.errors import SpecError
from .options import StackOptions

CHUNK = 128  # positions that the head is given at once where adapters are trained (litgpt/finetune/lora.py, fit)


@dataclass(frozen=True, repr=False)
class LitGPT(StackOptions):
    """LitGPT's recipes finetune_full and finetune_lora, with `--precision bf16-true`.

    No option of theirs changes memory beside the run's fields. They step torch's AdamW, which is not fused. One device
    recomputes nothing; several recompute all blocks, and shard by FSDP1 where the model is trained whole and by FSDP2
    where adapters are. Adapters are bf16 like the frozen weights, and the head is called on CHUNK positions at a time;
    a full fine-tune computes its loss in chunks of the logits. Fabric casts those to fp32.
    """

    name = "litgpt"
    families = ("llama",)
    half_adapters = True
    flat_parameters = True  # Fabric's FSDPStrategy
    loss_after_model = True  # litgpt/finetune/full.py, fit
    names_cuda = True
    unsupported_options: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("precision", "optimizer", "quantization", "compile"), "other recipes are not supported here"
    )
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("bf16",),
        "optimizer": ("adamw",),
        "quantization": (None,),
        "compile": (False,),
        "checkpointing": (None, "full"),
        "attention": ("sdpa",),
        "zero": (0, 3),
        **dict.fromkeys(("tp", "pp", "cp", "ep", "dp_replicate"), (1,)),
        **dict.fromkeys(("offload", "kernels", "fp8"), (None,)),
    }

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """bf16 throughout; on several devices FSDP, which reduces gradients after the last micro-batch
        (Fabric's no_backward_sync), and all blocks recomputed."""
        sharded = given["dp"] > 1
        return {
            "precision": "bf16", "zero": 3 if sharded else 0, "checkpointing": "full" if sharded else None,
            "sync_each_batch": not sharded or given["accumulation"] == 1,
        }  # fmt: skip

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError for what LitGPT's recipes do otherwise."""
        for field in ("zero", "checkpointing", "sync_each_batch"):
            if given[field] != (value := self.sets(given)[field]):
                ranks = f"dp={given['dp']}, accumulation={given['accumulation']}"
                told = f"{field}={given[field]!r} with stack='litgpt', {ranks}"
                raise SpecError(f"{told}: its recipes do not offer that; give {field}={value!r}")
        mlp = {"gate_proj", "up_proj", "down_proj"}
        targets = set(given["lora"].targets) & mlp if given["lora"] else set()
        if targets and targets != mlp:
            told = ", ".join(sorted(targets))
            raise SpecError(f"lora's targets {told}: lora_mlp adapts gate_proj, up_proj and down_proj; give all")
