"""torchtune's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...base.errors import SpecError
from .options import StackOptions

if TYPE_CHECKING:
    from ..model import ModelSpec

TuneOptimizer = Literal["AdamW", "AdamW8bit", "PagedAdamW8bit"]
NF4_ELEMENTS = 64 * 256  # weights per block of scales in torchao's NF4Tensor (dtypes/nf4tensor.py)


@dataclass(frozen=True, repr=False)
class Torchtune(StackOptions):
    """torchtune's options that change memory, by the names in its recipes' configurations.

    `enable_activation_checkpointing` recomputes every block. None follows the run's `checkpointing`; if that was not
    given either, it is the value of the Llama 3.1 8B configurations: True, except for LoRA on several devices.
    `enable_activation_offloading` moves saved activations to the host. `optimizer` is "AdamW" (torch's, fused), or
    "AdamW8bit" or "PagedAdamW8bit" of bitsandbytes; the states of the paged one are outside PyTorch's allocator. None
    follows the run's `optimizer`; if that was not given either, it is PagedAdamW8bit for full fine-tuning on one
    device. There the optimizer also steps in the backward pass (`optimizer_in_bwd`), unless micro-batches are
    accumulated. If the run has optimizer="adamw" instead, AdamW steps after the backward pass.
    `num_output_chunks` is that of CEWithChunkedOutputLoss; 0 stands for torch's CrossEntropyLoss on logits that were
    cast to fp32. `packed`: several samples share a sequence, and each token has its position as an input.
    `fsdp_reshard_after_forward` configures FSDP2 in the recipes for several devices.
    """

    name = "torchtune"
    families = ("llama",)
    ties_heads = True
    half_adapters = True
    fused_adamw = True
    torchao_nf4 = True  # modules/peft/lora.py
    reshards_model = True  # training/_distributed.py, shard_model
    loss_after_model = True  # recipes/full_finetune_distributed.py
    counts_hooks = True
    own_names: ClassVar[Mapping[str, str]] = {
        "checkpointing": "enable_activation_checkpointing",
        "optimizer": "optimizer",
        "zero": "fsdp_reshard_after_forward",
    }
    unsupported_options = {"double_quant": "torchao's NF4Tensor always quantizes its scales"}  # noqa: RUF012
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("bf16", "fp32"),
        "optimizer": ("adamw", "adamw-8bit"),
        "checkpointing": (None, "full"),
        "attention": ("sdpa",),
        "quantization": (None, "nf4"),
        "double_quant": (False,),
        "zero": (0, 2, 3),
        **dict.fromkeys(("tp", "pp", "cp", "ep", "dp_replicate"), (1,)),
        **dict.fromkeys(("offload", "kernels", "fp8"), (None,)),
        "sync_each_batch": (True,),
        "reduce_dtype": ("fp32",),
    }

    enable_activation_checkpointing: bool | None = None
    enable_activation_offloading: bool = False
    optimizer: TuneOptimizer | None = None
    optimizer_in_bwd: bool | None = None
    num_output_chunks: int = 8
    packed: bool = False
    fsdp_reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        if self.num_output_chunks:
            self._check_counts("num_output_chunks")
        super().__post_init__()

    def own_head(self, run: Any) -> bool:
        """Whether the head of `run` is an FSDP2 unit, and the embedding another: custom_sharded_layers of the
        configurations for full fine-tuning. Tied ones are not."""
        return run.lora is None

    @property
    def keeps_head(self) -> bool:
        """Whether FSDP2 keeps the head gathered from the forward to the backward pass."""
        return not self.fsdp_reshard_after_forward

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Set bf16 for everything, the recomputation and the optimizer of the configurations, and FSDP2 on several
        devices."""
        sharded, full = given["dp"] > 1, given["lora"] is None
        recomputes = self.enable_activation_checkpointing
        if recomputes is None:
            recomputes = full or not sharded
        narrow = self.optimizer != "AdamW" and (self.optimizer is not None or (full and not sharded))
        return {
            "precision": "bf16",
            "checkpointing": "full" if recomputes else None,
            "optimizer": "adamw-8bit" if narrow else "adamw",
            "zero": (3 if self.fsdp_reshard_after_forward else 2) if sharded else 0,
        }

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError if an option contradicts the run's fields `given`."""
        if self.optimizer_in_bwd and given["accumulation"] > 1:
            option = f"accumulation={given['accumulation']} with Torchtune(optimizer_in_bwd=True)"
            raise SpecError(f"{option}: each gradient is freed at once and cannot accumulate; give accumulation=1 or "
                            "leave it out")  # fmt: skip
        if self.optimizer_in_bwd and given["lora"]:
            raise SpecError("lora with Torchtune(optimizer_in_bwd=True): the LoRA recipes have no such option; leave "
                            "it out")  # fmt: skip
        if self.enable_activation_offloading and given["checkpointing"] is None:
            raise SpecError("enable_activation_offloading=True without checkpointing: torchtune offloads the "
                            "activations that a recomputed block keeps; give "
                            "enable_activation_checkpointing=True")  # fmt: skip

    def check_model(self, spec: ModelSpec, run: Any, stages: tuple[int, ...]) -> None:
        """Raise SpecError if no layer of attention has an adapter (models/llama3/_component_builders.py,
        lora_llama3_self_attention), or if torchao cannot quantize a linear layer of `spec`, because its elements do not
        fill whole blocks of scales."""
        attention = [linear.name for linear in spec.block_linears if linear.part == "attention"]
        if run.lora and not set(attention) & set(run.lora.targets):
            raise SpecError(f"targets={run.lora.targets} with stack='torchtune': it needs an adapter in attention too; "
                            f"add one of {', '.join(attention)}, or give another stack")  # fmt: skip
        if run.quantization is None:
            return
        for linear in spec.block_linears:
            if odd := linear.inputs * linear.outputs % NF4_ELEMENTS:
                shape = f"{linear.name} of {spec.name} is {linear.inputs} × {linear.outputs}"
                raise SpecError(f"quantization={run.quantization!r} with stack='torchtune': {shape}, {odd} more than a "
                                f"multiple of {NF4_ELEMENTS} elements, and torchao's NF4Tensor takes those alone; "
                                "drop quantization, or give another stack")  # fmt: skip

    def paged(self, run: Any) -> bool:
        """Whether the optimizer states of `run` are in paged memory, which the driver moves between GPU and host."""
        chosen = self.optimizer is None and run.lora is None and run.dp == 1
        return run.optimizer == "adamw-8bit" and (self.optimizer == "PagedAdamW8bit" or chosen)

    def steps_in_backward(self, run: Any) -> bool:
        """Whether each parameter of `run` is updated in the backward pass, as soon as it has its gradient."""
        if self.optimizer_in_bwd is None:
            replaced = self.optimizer is None and run.optimizer == "adamw"  # on one device: see `sets`
            return run.lora is None and run.dp == 1 and run.accumulation == 1 and not replaced
        return self.optimizer_in_bwd
