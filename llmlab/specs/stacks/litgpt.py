"""LitGPT's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...base.errors import SpecError
from .options import StackOptions

CHUNK = 128  # positions per call of the head when adapters are trained (litgpt/finetune/lora.py, fit)


@dataclass(frozen=True, repr=False)
class LitGPT(StackOptions):
    """LitGPT's recipes finetune_full and finetune_lora, with `--precision bf16-true`.

    Except for the run's fields, no option of the recipes changes memory. They use torch's unfused AdamW. One device
    recomputes nothing. Several devices recompute all blocks, and shard with FSDP1 in full fine-tuning and with FSDP2 if
    adapters are trained. Adapters are bf16 like the frozen weights, and with them the head is called on CHUNK positions
    at a time. Full fine-tuning computes its loss in chunks of the logits. Fabric casts the logits to fp32.
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
        """Set bf16 for everything; on several devices, set FSDP, which reduces gradients after the last micro-batch
        (Fabric's no_backward_sync), and full checkpointing."""
        sharded = given["dp"] > 1
        return {
            "precision": "bf16", "zero": 3 if sharded else 0, "checkpointing": "full" if sharded else None,
            "sync_each_batch": not sharded or given["accumulation"] == 1,
        }  # fmt: skip

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError for fields that LitGPT's recipes set to other values, and for adapters on only some of the
        MLP's layers."""
        for field in ("zero", "checkpointing", "sync_each_batch"):
            if given[field] != (value := self.sets(given)[field]):
                ranks = f"dp={given['dp']}, accumulation={given['accumulation']}"
                option = f"{field}={given[field]!r} with stack='litgpt', {ranks}"
                raise SpecError(f"{option}: its recipes do not offer that; give {field}={value!r}")
        mlp = {"gate_proj", "up_proj", "down_proj"}
        targets = set(given["lora"].targets) & mlp if given["lora"] else set()
        if targets and targets != mlp:
            option = ", ".join(sorted(targets))
            raise SpecError(f"lora's targets {option}: lora_mlp adapts gate_proj, up_proj and down_proj; give all")
