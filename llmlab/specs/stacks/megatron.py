"""Megatron-LM's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...base.errors import SpecError
from .options import StackOptions

if TYPE_CHECKING:
    from ..model import ModelSpec

Recompute = Literal["selective", "full"]
RecomputeMethod = Literal["uniform", "block"]
FP8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
FusedLoss = Literal["native", "te"]
CudaGraphs = Literal["full_iteration"]
FusedAdam = Literal["fp32", "bf16"]
RECOMPUTED = {"core_attn", "mlp"}  # modules of Megatron's --recompute-modules that are described


@dataclass(frozen=True, repr=False)
class Megatron(StackOptions):
    """Megatron-LM's options that change memory or time, by the names of its arguments (megatron/training/arguments.py).

    `recompute` is --recompute-granularity, None the run's `checkpointing`. "selective" computes `recompute_modules`
    again, of "core_attn" and "mlp". "full" keeps the input of every `recompute_num_layers` layers ("uniform"), or
    the inputs of so many layers of each virtual stage, and the others whole ("block").

    `transformer_engine`: layers of Transformer Engine, or Megatron's own (--transformer-impl local), whose attention is
    unfused, attention="eager", and knows no context parallelism. `masked_softmax_fusion`: softmax of unfused attention
    as one kernel in half precision; of Megatron's own layers it is Apex's. `apex`: whether that is installed, or
    Transformer Engine for what is outside of layers; if not, PyTorch computes softmax, in fp32, and steps AdamW.
    `accumulate_allreduce_grads_in_fp32`: None is Megatron's default, True for bf16. `tp_comm_overlap` hides what tensor
    parallelism sends behind the products before and after it (Transformer Engine's userbuffers). `overlap_grad_reduce`
    sums gradients behind backward and, with zero=1 and `overlap_param_gather`, gathers parameters behind forward, as
    NeMo's recipes do; Megatron-LM, where nobody asks for it, sends all of that after the last backward.
    `async_tensor_model_parallel_allreduce` sums the gradient of a column-parallel layer's input while its weight's is
    computed, since 2021-09-02 (no argument turns it off since 2026-01-29); what sequence parallelism sends there is
    behind products anyway. `gradient_accumulation_fusion` adds a weight's gradient to the sum as it is multiplied, by
    Apex's kernel, of 2022 (--no-gradient-accumulation-fusion is off). `bias_swiglu_fusion` computes SwiGLU by one
    kernel, `apply_rope_fusion` rotates queries and keys by one of Transformer Engine's, which Megatron's own layers do
    not: since 2024-01-18 (commit de9428a701; --no-bias-swiglu-fusion, --no-rope-fusion), before operator by operator.
    `overlap_p2p_communication` sends between
    interleaved stages behind other chunks, since 2023-05-31 (--no-overlap-p2p-communication is off).
    `deepspeed` is Megatron-DeepSpeed, whose pipeline and ZeRO are DeepSpeed's. Their buffers are not described, so its
    memory is a lower bound, and it seldom "fits" (formulas/verdict.py, MEGATRON_DEEPSPEED).
    `cuda_launch_blocking` is CUDA_LAUNCH_BLOCKING=1: a kernel is started when the one before it is done.
    `cuda_graph_impl` "full_iteration" has all passes of a step in one CUDA graph, so that nothing waits for the host
    (megatron/core/full_cuda_graph.py; before 2026 --cuda-graph-impl local --cuda-graph-scope full_iteration); what
    the graph's own pool takes of the memory is not counted. It is estimated, not simulated.
    `cross_entropy_fusion_impl` fuses the loss (--cross-entropy-loss-fusion): "native" compiles its functions one by
    one, which takes more memory than not to fuse, and "te" is Transformer Engine's kernel. NeMo 2's recipes for
    pre-training say "native". `virtual_pipeline` is the model chunks of a rank
    (--num-virtual-stages-per-pipeline-rank), `make_vocab_size_divisible_by` pads the vocabulary of each
    tensor-parallel rank. The distributed optimizer is the run's zero=1, sequence parallelism its sequence_parallel,
    --attention-backend unfused its attention="eager". `fp8_recipe` is --fp8-recipe, with --fp8-format hybrid:
    Transformer Engine multiplies blocks' linear layers in fp8 (formulas/memory/float8.py); "tensorwise" is its current
    scaling. `fp8_param_gather` keeps their weights in fp8 instead of half precision, and gathers them so; of "mxfp8" it
    means --reuse-grad-buf-for-mxfp8-param-ag too. `use_precision_aware_optimizer` keeps of main weights the 2 bytes
    that bf16 ones have not, and takes gradients as they were summed; moments stay fp32. `distributed_fused_adam` is
    NeMo 1's optimizer of that name, Apex's, with its states in that dtype. In fp32 it does the same, in bf16 it keeps
    no main weights; beside weights in fp8 it keeps them whole, and it sums the embedding's gradients in fp32 (NeMo 2.0,
    megatron_base_model.py, setup_optimization; megatron_gpt_model.py, configure_optimizers).
    `defer_embedding_wgrad_compute` computes the gradient of the head's weight after the last micro-batch, for which the
    last stage keeps the logits' gradients of `wgrad_deferral_limit` micro-batches (0: of all).
    `moe_expert_capacity_factor` (with --moe-pad-expert-input-to-capacity) fills each expert with that multiple of an
    equal share of the tokens; None, Megatron's default, drops no token, and experts are estimated as equally loaded.
    `expandable_segments` is PYTORCH_CUDA_ALLOC_CONF's, which Megatron-Bridge's recipes set. Adapters (`lora`) are
    Megatron-Bridge's beside Transformer Engine's layers (megatron/bridge/peft/canonical_lora.py): in half precision,
    their main weights and moments in fp32, without dropout, which is not described. They are estimated, not simulated.
    """

    name = "megatron"
    families = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "phi3")
    own_kernels = True  # core/fusions, Apex's, Transformer Engine's
    own_sums = True  # core/distributed/param_and_grad_buffer.py
    ties_heads = True
    half_adapters = True
    timed_pipelines = True  # core/pipeline_parallel/schedules.py
    pads_vocabulary = True  # make_vocab_size_divisible_by
    names_cuda = True
    without_lora = "Megatron-LM's arguments have no lora"
    own_names: ClassVar[Mapping[str, str]] = {"checkpointing": "recompute", "virtual_stages": "virtual_pipeline"}
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("mixed-bf16", "mixed-fp16"),
        "optimizer": ("adamw",),
        "attention": ("sdpa", "flash", "eager"),
        "zero": (0, 1),
        "loss_parallel": (True,),
        "quantization": (None,),
        "offload": (None,),
        "compile": (False,),
        "kernels": (None,),
        "schedule": ("1f1b",),
        "sync_each_batch": (True,),
        "reduce_dtype": ("fp32",),
    }

    recompute: Recompute | None = None
    recompute_method: RecomputeMethod | None = None
    recompute_num_layers: int = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)
    transformer_engine: bool = True
    masked_softmax_fusion: bool = True
    apex: bool = True
    accumulate_allreduce_grads_in_fp32: bool | None = None
    tp_comm_overlap: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    async_tensor_model_parallel_allreduce: bool = True
    gradient_accumulation_fusion: bool = True
    bias_swiglu_fusion: bool = True
    apply_rope_fusion: bool = True
    overlap_p2p_communication: bool = True
    deepspeed: bool = False
    cuda_launch_blocking: bool = False
    cuda_graph_impl: CudaGraphs | None = None
    virtual_pipeline: int = 1
    make_vocab_size_divisible_by: int = 128
    fp8_recipe: FP8Recipe | None = None
    cross_entropy_fusion_impl: FusedLoss | None = None
    moe_expert_capacity_factor: float | None = None
    fp8_param_gather: bool = False
    use_precision_aware_optimizer: bool = False
    distributed_fused_adam: FusedAdam | None = None
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        self._check_counts("recompute_num_layers", "virtual_pipeline", "make_vocab_size_divisible_by")
        super().__post_init__()
        if (asked := self.moe_expert_capacity_factor) is not None:
            try:
                capacity = float(asked)
            except (TypeError, ValueError):
                capacity = 0.0
            if not 0 < capacity < inf:
                raise SpecError(f"moe_expert_capacity_factor={asked!r} is neither a number above 0 nor None")
            object.__setattr__(self, "moe_expert_capacity_factor", capacity)  # of a text too
        if self.fp8_recipe and not self.transformer_engine:
            given = f"fp8_recipe={self.fp8_recipe!r} with transformer_engine=False"
            raise SpecError(f"{given}: Megatron's own layers have no fp8; give one of the two")
        if self.fp8_param_gather and not self.fp8_recipe:
            raise SpecError("fp8_param_gather=True needs fp8_recipe; give one")
        limit = self.wgrad_deferral_limit
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
            raise SpecError(f"wgrad_deferral_limit={limit!r} is not a number of micro-batches >= 0")
        if limit and not self.defer_embedding_wgrad_compute:
            raise SpecError(f"wgrad_deferral_limit={limit} needs defer_embedding_wgrad_compute=True; give both")
        if self.defer_embedding_wgrad_compute and not self.gradient_accumulation_fusion:
            raise SpecError("defer_embedding_wgrad_compute=True with gradient_accumulation_fusion=False: Megatron-LM "
                            "refuses it (model_parallel_config.py); give one of the two")  # fmt: skip
        modules = self.recompute_modules
        modules = tuple(modules.split() if isinstance(modules, str) else modules)
        if not modules or not set(modules) <= RECOMPUTED:
            raise SpecError(f"recompute_modules={modules!r} is not one or both of {', '.join(sorted(RECOMPUTED))}")
        object.__setattr__(self, "recompute_modules", modules)
        if self.recompute == "selective" and self.recompute_method:
            raise SpecError(f"recompute_method={self.recompute_method!r} needs recompute='full'")

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError for what Megatron has not, its own layers above all, with the run's fields `given`."""
        if self.tp_comm_overlap and not given["sequence_parallel"]:
            raise SpecError("tp_comm_overlap=True needs sequence_parallel=True, whose all-gathers and "
                            "reduce-scatters overlap with matmuls (arguments.py); give both")  # fmt: skip
        if self.defer_embedding_wgrad_compute and given["pp"] == 1:
            raise SpecError("defer_embedding_wgrad_compute=True with pp=1: it fills the end of a pipeline "
                            "(model_parallel_config.py); give pp >= 2, or leave it out")  # fmt: skip
        self._check_optimizer(given)
        self._check_adapters(given)
        if self.transformer_engine:
            if not self.apex:
                raise SpecError("apex=False with transformer_engine=True: Transformer Engine replaces Apex's kernels; "
                                "give one of them")  # fmt: skip
            return
        own = "Megatron's own layers (transformer_engine=False)"
        if given["attention"] != "eager":
            raise SpecError(f"attention={given['attention']!r}: {own} support attention='eager' only")
        if given["cp"] > 1:
            raise SpecError(f"cp={given['cp']}: attention of {own} needs whole sequences (dot_product_attention.py); "
                            "give cp=1, or Transformer Engine's")  # fmt: skip
        if given["sequence_parallel"] and not self.apex:
            raise SpecError(f"sequence_parallel=True with apex=False: {own} then use PyTorch's norm, which refuses it "
                            "(torch_norm.py); give one of the two")  # fmt: skip

    def _check_adapters(self, given: Mapping[str, Any]) -> None:
        if (lora := given["lora"]) is None:
            return
        if not self.transformer_engine or self.distributed_fused_adam or self.defer_embedding_wgrad_compute:
            raise SpecError("lora= with transformer_engine=False, distributed_fused_adam or "
                            "defer_embedding_wgrad_compute: adapters are supported with Transformer Engine's layers, "
                            "with Megatron-LM's own optimizer; give one of the two")  # fmt: skip
        if lora.dropout:
            raise SpecError(f"dropout={lora.dropout} of lora= is not supported for megatron; give dropout=0")

    def _check_optimizer(self, given: Mapping[str, Any]) -> None:
        shared = given["zero"] == 1 or given["dp"] * given["cp"] == 1
        if self.fp8_param_gather and not shared:
            raise SpecError("fp8_param_gather=True with zero=0: only the distributed optimizer gathers them "
                            "(arguments.py); give zero=1")  # fmt: skip
        own = f"distributed_fused_adam={self.distributed_fused_adam!r} with"
        if self.use_precision_aware_optimizer:
            if self.distributed_fused_adam:
                raise SpecError(f"{own} use_precision_aware_optimizer=True: each is an optimizer; give one")
            own = "use_precision_aware_optimizer=True with"
            if self.fp8_param_gather and self.fp8_recipe == "delayed":
                raise SpecError(f"{own} fp8_param_gather=True and fp8_recipe='delayed' is not supported; leave one out")
        elif self.distributed_fused_adam is None:
            return
        if not shared:
            raise SpecError(f"{own} zero=0: it shards states over all data-parallel ranks; give zero=1")
        if given["precision"] != "mixed-bf16":
            raise SpecError(f"{own} precision={given['precision']!r} is not supported here; "
                            "give mixed-bf16")  # fmt: skip

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Half weights and products with fp32 main weights; nothing is recomputed or sharded unless somebody asks."""
        own = {} if self.transformer_engine else {"attention": "eager"}
        return {
            **own,
            "precision": "mixed-bf16",
            "checkpointing": self.recompute or given["checkpointing"],
            "virtual_stages": self.virtual_pipeline,
        }

    @property
    def checks_losses(self) -> bool:
        """Before backward (pretrain_gpt.py, loss_func), and gradients before it sends them (core/distributed/
        param_and_grad_buffer.py, check_grads), and their norm; a CUDA graph of all passes has no such check."""
        return self.cuda_graph_impl is None

    @property
    def rotates_at_once(self) -> bool:
        """Whether one kernel rotates queries and keys: Transformer Engine's (transformer/transformer_config.py)."""
        return self.transformer_engine and self.apply_rope_fusion

    @property
    def hides_sends(self) -> bool:
        """Whether what stages send each other is behind the computation of another chunk."""
        return self.overlap_p2p_communication and self.virtual_pipeline > 1

    @property
    def keeps_remainders(self) -> bool:
        """Whether of main weights only what bf16 ones lack is kept, and gradients are taken as they were summed: beside
        fp8 with the delayed recipe alone (megatron/core/optimizer/optimizer_config.py)."""
        return self.use_precision_aware_optimizer and self.fp8_recipe in (None, "delayed")

    def accumulates_in_fp32(self, dtype: str) -> bool:
        """Whether gradients of a run in `dtype` are summed in fp32."""
        asked = self.accumulate_allreduce_grads_in_fp32
        return dtype == "bf16" if asked is None else asked

    def overlap(self, run: Any) -> tuple[str, ...]:
        """Return "data" with overlap_grad_reduce, and "tensor" for what tensor parallelism sends in backward."""
        tensor = run.sequence_parallel or self.async_tensor_model_parallel_allreduce
        return ("data",) * self.overlap_grad_reduce + ("tensor",) * tensor

    def recomputed_blocks(self, run: Any, layers: int) -> int:
        """With recompute_method="block" the first recompute_num_layers of each virtual stage
        (megatron/core/transformer/transformer_block.py, _checkpointed_forward)."""
        if run.checkpointing != "full" or self.recompute_method != "block":
            return layers
        return run.virtual_stages * min(self.recompute_num_layers, layers // run.virtual_stages)

    def check_stages(self, stages: tuple[int, ...]) -> None:
        """Raise SpecError where stages of these numbers of layers cannot be cut into the virtual ones."""
        chunks = self.virtual_pipeline
        given = f"virtual_pipeline={chunks}"
        ends = {0, len(stages) - 1} if min(stages) < max(stages) else set()  # there embedding and head are layers too
        if any((layers + (stage in ends)) % chunks for stage, layers in enumerate(stages)):
            raise SpecError(f"{given} does not divide the layers of each stage, {', '.join(map(str, stages))}")

    def check_model(self, spec: ModelSpec, run: Any, stages: tuple[int, ...]) -> None:
        """Raise SpecError for what megatron-core does not train of `spec`; `stages` are their numbers of layers."""
        self.check_stages(stages)
        self._check_experts(spec, run)
        chunks = self.virtual_pipeline
        number, uniform = self.recompute_num_layers, self.recompute_method != "block"
        if run.checkpointing == "full" and uniform and any(layers // chunks % number for layers in stages):
            raise SpecError(f"recompute_num_layers={number} does not divide the {stages[0] // chunks} layers of a "
                            "chunk: its last group would end beyond it (transformer_block.py)")  # fmt: skip
        if run.checkpointing == "selective" and "mlp" in self.recompute_modules and spec.mlp_bias:
            raise SpecError(f"recompute_modules={' '.join(self.recompute_modules)!r} with {spec.name}, whose MLP has "
                            "biases: megatron-core's checkpoint recurses without end in backward, because the bias is "
                            "among what it returns (tensor_parallel/random.py); leave out mlp")  # fmt: skip
        if run.sequence_parallel and not self.transformer_engine and spec.norm == "rmsnorm":
            raise SpecError(f"sequence_parallel=True with {spec.name}: the RMSNorm of Megatron's own layers is "
                            "PyTorch's, which refuses it (torch_norm.py); give transformer_engine=True")  # fmt: skip

    def _check_experts(self, spec: ModelSpec, run: Any) -> None:
        if not spec.experts:
            if self.moe_expert_capacity_factor is not None:
                given = f"moe_expert_capacity_factor={self.moe_expert_capacity_factor} with {spec.name}"
                raise SpecError(f"{given}, which has no experts; leave it out")
            return
        given = f"stack='megatron' does not support {spec.name}, whose MLPs are experts,"
        if run.tp > 1:
            raise SpecError(f"{given} with tp={run.tp}; give tp=1 and ep")
        if self.fp8_recipe:
            raise SpecError(f"{given} with fp8_recipe={self.fp8_recipe!r}; leave it out")
        if not self.bias_swiglu_fusion:
            raise SpecError(f"{given} with bias_swiglu_fusion=False; leave it out")
        if run.checkpointing == "selective" and "mlp" in self.recompute_modules:
            raise SpecError(f"{given} with recompute_modules='mlp', which means dense MLPs; leave mlp out")
