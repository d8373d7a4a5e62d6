"""torchtitan's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...base.errors import SpecError
from .options import StackOptions

if TYPE_CHECKING:
    from ..model import ModelSpec

TitanAC = Literal["none", "full", "selective_op", "selective_layers"]
Reshard = Literal["default", "always", "never"]
TitanOptimizer = Literal["fused", "foreach"]
TitanNorm = Literal["rmsnorm", "fused_rmsnorm"]


@dataclass(frozen=True, repr=False)
class Torchtitan(StackOptions):
    """torchtitan's options that change memory, by the names in its torchtitan/config/job_config.py.

    `ac` selects the activations that the backward pass recomputes. None follows the run's `checkpointing`; if that was
    not given either, it is "selective_op", as in torchtitan's Llama configurations, which recomputes everything except
    attention and every second matmul. "selective_layers" recomputes one of `every` blocks as a whole.
    `keeps_attention=False` describes "selective_op" up to release 0.2.0, whose list of saved operators lacks cuDNN's
    attention, the kernel that an H100 runs. `reshard_after_forward` is FSDP2's policy: "default" keeps the final norm
    and the head gathered until the backward pass, and in a pipeline all weights; "never" keeps all weights. `optimizer`
    is the implementation of AdamW; until 2025-02-24 its default was "foreach". `enable_fsdp_float8_all_gather` is read
    with fp8="tensorwise"; torchtitan's default is False, and the command in its docs/float8.md sets True.
    `compile_loss`: whether "loss" is among compile.components, which compile=True turns on; give False for commits
    before the loss could be compiled (March 2025). Releases before 0.2.0 prefer FlashAttention 2: give the run
    attention="flash". `norm_type`, in its configurations until April 2025, is the RMSNorm of an uncompiled run.
    "rmsnorm", which most configurations had, runs operator by operator in fp32, as nn.RMSNorm did up to torch 2.7.
    "fused_rmsnorm" is one kernel, as nn.RMSNorm has been since.
    """

    name = "torchtitan"
    families = ("llama", "qwen3", "qwen3_moe")
    expandable_segments = True  # run_train.sh
    own_experts = True  # models/llama4/infra/parallelize.py, apply_fsdp
    lists_kernels = True  # cuDNN's, FlashAttention and "math" (models/attention.py)
    recomputes_every_second_matmul = True  # distributed/activation_checkpoint.py
    torch_stages = True  # distributed/pipeline_parallel.py
    counts_embedding_and_head_as_layers = True
    models_embedding_backward = True
    counts_hooks = True
    chooses_zero = True
    own_names: ClassVar[Mapping[str, str]] = {"checkpointing": "ac", "zero": "reshard_after_forward"}
    unsupported_options: ClassVar[Mapping[str, str]] = {
        "memory_budget": "with it, torch's partitioner chooses which operators to recompute; give ac= instead",
        "disable_loss_parallel": "with tensor parallelism each rank computes the loss of its logits; leave it out",
        "enable_async_tensor_parallel": "it allocates symmetric memory outside of PyTorch's allocator; leave it out",
        "enable_cpu_offload": "offloading is supported with stack='transformers' (offload=); leave it out",
        "pipeline_parallel_schedule": "give the run schedule='gpipe' or virtual_stages=2 instead",
        "expert_parallel_degree": "give the run ep= instead",
    }
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("mixed-bf16", "autocast-bf16", "fp32"),
        "optimizer": ("adamw",),
        "attention": ("sdpa", "flash"),
        "loss_parallel": (True,),
        **dict.fromkeys(("lora", "quantization", "offload", "kernels"), (None,)),
        "virtual_stages": (1, 2),
        "sync_each_batch": (True,),
        "reduce_dtype": ("fp32",),
    }

    ac: TitanAC | None = None
    every: int = 2
    keeps_attention: bool = True
    reshard_after_forward: Reshard = "default"
    optimizer: TitanOptimizer = "fused"
    norm_type: TitanNorm = "fused_rmsnorm"
    enable_fsdp_float8_all_gather: bool = True
    compile_loss: bool = True

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW updates in place, without temporaries."""
        return self.optimizer == "fused"

    @property
    def recomputes_one_in(self) -> int:
        """`every` with "selective_layers", which recomputes the last of that many blocks
        (distributed/activation_checkpoint.py, _apply_layer_sac); otherwise 0."""
        return self.every if self.ac == "selective_layers" else 0

    def accumulates_in_fp32(self, dtype: str) -> bool:
        """True, because mixed_precision_reduce is float32."""
        return True

    def own_head(self, run: Any) -> bool:
        """True: the final norm and the head are one FSDP2 unit, and the embedding is another (infra/parallelize.py,
        apply_fsdp)."""
        return True

    @property
    def keeps_head(self) -> bool:
        """Whether FSDP2 keeps the head gathered from the forward to the backward pass."""
        return self.reshard_after_forward != "always"

    def __post_init__(self) -> None:
        self._check_counts("every")
        super().__post_init__()

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError for DDP, for a precision that torchtitan does not support with these degrees (see `sets`),
        for tensor parallelism without sequence parallelism, and for 1F1B with fewer micro-batches than stages, which
        torch refuses (torch/distributed/pipelining/schedules.py, Schedule1F1B)."""
        pp, accumulation, precision = given["pp"], given["accumulation"], given["precision"]
        if given["zero"] == 0 and given["dp"] * given["cp"] > 1:
            raise SpecError(f"zero=0 with dp={given['dp']}, cp={given['cp']}: torchtitan is described with FSDP2 "
                            "over these ranks, not with DDP; leave zero out, or give another stack")  # fmt: skip
        if precision != (supported := _halves(given)):
            degrees = ", ".join(f"{name}={given[name]}" for name in ("dp", "cp", "tp", "pp"))
            raise SpecError(f"precision={precision!r} with {degrees}: torchtitan computes in halves by FSDP2 where dp "
                            "or cp shards, by autocast on one device, and not with tp or pp alone; give "
                            f"precision={supported!r}")  # fmt: skip
        if given["tp"] > 1 and not given["sequence_parallel"]:
            raise SpecError(f"sequence_parallel=False with tp={given['tp']}: torchtitan's tensor parallelism divides "
                            "norms too; give sequence_parallel=True, or another stack")  # fmt: skip
        if pp > accumulation and given["schedule"] == "1f1b":
            raise SpecError(f"accumulation={accumulation} with pp={pp}: torch's 1F1B takes at least as many "
                            f"micro-batches as stages; give accumulation={pp}, or schedule='gpipe'")  # fmt: skip

    def check_model(self, spec: ModelSpec, run: Any, stages: tuple[int, ...]) -> None:
        """Raise SpecError for a pipeline of Qwen3, and for attention heads that its classes do not support or that
        `tp` does not divide."""
        if spec.family.startswith("qwen3") and run.pp > 1:
            raise SpecError(f"pp={run.pp} with {spec.name}: torchtitan has no pipeline for qwen3 "
                            "(models/qwen3/__init__.py, pipelining_fn); give pp=1, or another stack")  # fmt: skip
        if spec.family == "llama" and spec.query_width != spec.hidden:
            raise SpecError(f"head_dim={spec.head_dim} with {spec.name}: torchtitan's Llama computes the head size as "
                            f"hidden / heads = {spec.hidden // spec.heads} (models/llama3/model/model.py, Attention); "
                            "give another stack")  # fmt: skip
        if spec.kv_heads % run.tp:
            raise SpecError(f"tp={run.tp} with {spec.name}: torchtitan gives each rank whole key/value heads, and the "
                            f"model has {spec.kv_heads} (models/llama3/model/model.py, Attention); give a tp that "
                            "divides them, or another stack")  # fmt: skip

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Set bf16 by FSDP2's policy; by autocast on one device, where nothing is sharded (distributed/utils.py,
        maybe_enable_amp); and fp32 with only tensor or pipeline parallelism. Also set checkpointing, the ZeRO stage of
        FSDP2's policy, and sequence parallelism."""
        sharded = given["dp"] * given["cp"] > 1
        never = {"never": True, "default": given["pp"] > 1}.get(self.reshard_after_forward, False)
        modes = {None: "selective", "none": None, "full": "full"}
        return {
            "precision": _halves(given),
            "checkpointing": modes.get(self.ac, "selective"),
            "zero": (2 if never else 3) if sharded else 0,
            "sequence_parallel": given["tp"] > 1,
        }


def _halves(given: Mapping[str, Any]) -> str:
    """Return the precision that torchtitan supports with the degrees in `given`."""
    if given["dp"] * given["cp"] > 1:
        return "mixed-bf16"
    return "autocast-bf16" if given["tp"] * given["pp"] == 1 else "fp32"
