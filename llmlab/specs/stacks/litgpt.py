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
    """LitGPT's recipes finetune_full and finetune_lora on one device, with `--precision bf16-true`.

    They recompute nothing there, and step torch's AdamW, which is not fused. They have no option that changes memory
    beside the run's fields: LoRA's adapters are bf16 like the frozen weights, the head is called on CHUNK positions at
    a time, and full fine-tuning computes its loss in chunks of CHUNK rows of logits that Fabric cast to fp32.
    """

    name = "litgpt"
    package = "litgpt"
    families = ("llama", "mistral")
    own_names: ClassVar[Mapping[str, str]] = {}
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("bf16",),
        "optimizer": ("adamw",),
        "checkpointing": (None, "full"),
        "attention": ("sdpa",),
        "quantization": (None,),
        "zero": (0, 3),
        "tp": (1,),
        "pp": (1,),
        "cp": (1,),
        "ep": (1,),
        "dp_replicate": (1,),
        "offload": (None,),
        "compile": (False,),
        "kernels": (None,),
        "fp8": (None,),
    }

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """bf16 throughout; on several devices FSDP, and all blocks recomputed."""
        sharded = given["dp"] > 1
        return {"precision": "bf16", "zero": 3 if sharded else 0, "checkpointing": "full" if sharded else None}

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError for adapters that LitGPT has not."""
        mlp = {"gate_proj", "up_proj", "down_proj"}
        targets = set(given["lora"].targets) & mlp if given["lora"] else set()
        if targets and targets != mlp:
            told = ", ".join(sorted(targets))
            raise SpecError(f"lora's targets {told}: LitGPT's lora_mlp adapts gate_proj, up_proj and down_proj; give all")
