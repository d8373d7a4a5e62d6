"""Megatron-LM's options."""

from __future__ import annotations

import re
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
CudaGraphs = Literal["full_iteration", "transformer_engine"]
Dispatcher = Literal["deepep", "hybridep"]
FusedAdam = Literal["fp32", "bf16"]
GRAPHED = {"attn", "moe_router", "moe_preprocess"}  # modules of --cuda-graph-modules that are described
# Modules of Megatron's --recompute-modules that are described, and those of them that only some models have.
RECOMPUTED = {"core_attn", "mlp", "layernorm", "moe_act", "mla_up_proj"}
OF_EXPERTS, OF_LATENTS = {"layernorm", "moe_act"}, {"mla_up_proj"}


@dataclass(frozen=True, repr=False)
class Megatron(StackOptions):
    """Megatron-LM's options that change memory or time, by the names of its arguments (megatron/training/arguments.py).

    `recompute` is --recompute-granularity; None follows the run's `checkpointing`. "selective" recomputes
    `recompute_modules`: "core_attn", "mlp", and in mixtures "moe_act" (the experts' activation), "layernorm" (the norm
    before the experts, with latent attention also the one before attention) and "mla_up_proj" (queries, keys and values
    from their latents). "full" saves the input of every group of
    `recompute_num_layers` layers (`recompute_method` "uniform"), or only the inputs of that many layers of each virtual
    stage and all activations of the others ("block").

    `transformer_engine`: whether the layers are Transformer Engine's or Megatron's own (--transformer-impl local).
    Attention of the latter is unfused, attention="eager", and does not support context parallelism.
    `masked_softmax_fusion`: the softmax of unfused attention is one 16-bit kernel, which for Megatron's own layers is
    Apex's. `apex`: whether Apex is installed, or Transformer Engine for the code outside the layers. Without it,
    PyTorch computes softmax, in fp32, and runs AdamW.
    `accumulate_allreduce_grads_in_fp32`: None is Megatron's default, True for bf16. `tp_comm_overlap` overlaps the
    communication of tensor parallelism with the matmuls before and after it (Transformer Engine's userbuffers).
    `overlap_grad_reduce` overlaps the reduction of gradients with the backward pass and, with zero=1,
    `overlap_param_gather` overlaps the all-gather of parameters with the forward pass, as in NeMo's recipes. Without
    these arguments, Megatron-LM communicates after the last backward pass.
    `async_tensor_model_parallel_allreduce` all-reduces the gradient of a column-parallel layer's input while that of
    its weight is computed, since 2021-09-02 (no argument turns it off since 2026-01-29). The communication of sequence
    parallelism there always overlaps with matmuls. `gradient_accumulation_fusion` adds a weight's gradient to the
    accumulated one within the matmul, by Apex's kernel, of 2022 (--no-gradient-accumulation-fusion turns it off).
    `bias_swiglu_fusion` computes SwiGLU in one kernel. `apply_rope_fusion` rotates queries and keys in one kernel of
    Transformer Engine, but not in Megatron's own layers. Both exist since 2024-01-18 (commit de9428a701;
    --no-bias-swiglu-fusion, --no-rope-fusion); before, these ran operator by operator.
    `overlap_p2p_communication` overlaps the communication between interleaved stages with the computation of other
    chunks, since 2023-05-31 (--no-overlap-p2p-communication turns it off).
    `deepspeed` is Megatron-DeepSpeed, whose pipeline and ZeRO are DeepSpeed's. Their buffers are not described, so its
    memory is a lower bound, and it seldom "fits" (formulas/verdict.py, MEGATRON_DEEPSPEED).
    `cuda_launch_blocking` is CUDA_LAUNCH_BLOCKING=1: each kernel is launched only when the one before it has finished.
    `cuda_graph_impl` "full_iteration" has all passes of a step in one CUDA graph, so that nothing waits for the host
    (megatron/core/full_cuda_graph.py; before 2026 --cuda-graph-impl local --cuda-graph-scope full_iteration). The
    memory of the graph's own pool is not counted. "transformer_engine" has a graph of each layer's modules in
    `cuda_graph_modules`, and is described for mixtures only. Such runs are estimated, not simulated.
    `cross_entropy_fusion_impl` fuses the loss (--cross-entropy-loss-fusion): "native" compiles its functions one by
    one, which needs more memory than the unfused loss, and "te" is Transformer Engine's kernel. NeMo 2's recipes for
    pre-training set "native". `virtual_pipeline` is the number of model chunks per rank
    (--num-virtual-stages-per-pipeline-rank).
    `pipeline_model_parallel_layout` has the layers of each chunk, such as "Et*4|(t*4|)*14tmL": t is a layer, m a module
    for multi-token prediction, which counts as a layer, a matmul that joins two streams, and the head with its loss
    once more. Its memory is that of the layer, and its layer does not count for utilization.
    `make_vocab_size_divisible_by` pads the vocabulary of each
    tensor-parallel rank. The distributed optimizer is the run's zero=1, sequence parallelism its sequence_parallel,
    --attention-backend unfused its attention="eager". `fp8_recipe` is --fp8-recipe, with --fp8-format hybrid:
    Transformer Engine runs the matmuls of the blocks' linear layers in fp8 (formulas/memory/float8.py); "tensorwise" is
    its current scaling. `fp8_param_gather` stores and gathers their weights in fp8 instead of 16 bits; with "mxfp8" it
    also means --reuse-grad-buf-for-mxfp8-param-ag. `use_precision_aware_optimizer` stores only the 2 bytes of main
    weights that bf16 weights lack, and uses gradients in the dtype in which they were accumulated; moments stay in
    fp32. `distributed_fused_adam` is NeMo 1's optimizer of that name, from Apex, with its states in the given dtype.
    With "fp32" it stores the same as the precision-aware one, and with "bf16" it has no main weights. For weights in
    fp8 it stores whole main weights, and it accumulates the embedding's gradients in fp32 (NeMo 2.0,
    megatron_base_model.py, setup_optimization; megatron_gpt_model.py, configure_optimizers).
    `defer_embedding_wgrad_compute` computes the gradient of the head's weight after the last micro-batch. Until then,
    the last stage saves the gradients of the logits of `wgrad_deferral_limit` micro-batches (0: of all).
    `moe_expert_capacity_factor` (with --moe-pad-expert-input-to-capacity) pads or cuts the tokens of each expert to
    that multiple of an equal share. None, Megatron's default, drops no token, and experts are estimated as equally
    loaded.
    `expert_tensor_parallel_size` 1 leaves each expert whole, so that `ep` divides all ranks of a stage. It is
    necessary with experts and tp > 1, because experts that tensor parallelism divides are not described.
    `moe_flex_dispatcher_backend` (--moe-token-dispatcher-type flex) sends a token once to each rank that has some of
    its experts, and not once to each expert as all-to-all does; its buffers are not counted.
    `overlap_moe_expert_parallel_comm` runs the forward pass of one micro-batch and the backward pass of another
    concurrently, so that each hides the other's communication with experts; the additional activations are not counted.
    `use_transformer_engine_op_fuser` (with fp8_recipe "mxfp8") computes the experts' SwiGLU and its casts within the
    matmuls, as Transformer Engine's grouped MLP does with interleaved weights.
    `expandable_segments` is that of PYTORCH_CUDA_ALLOC_CONF, which Megatron-Bridge's recipes set. Adapters (`lora`) are
    those of Megatron-Bridge for Transformer Engine's layers (megatron/bridge/peft/canonical_lora.py): in 16 bits, with
    main weights and moments in fp32, and without dropout, which is not described. They are estimated, not simulated.
    """

    name = "megatron"
    families = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "deepseek_v3", "gpt_oss")
    own_kernels = True  # core/fusions, Apex's, Transformer Engine's
    spreads_experts = True  # core/parallel_state.py, expert_decoder_rank_generator
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
    cuda_graph_modules: tuple[str, ...] = ("attn", "moe_router", "moe_preprocess")
    virtual_pipeline: int = 1
    pipeline_model_parallel_layout: str | None = None
    make_vocab_size_divisible_by: int = 128
    fp8_recipe: FP8Recipe | None = None
    cross_entropy_fusion_impl: FusedLoss | None = None
    moe_expert_capacity_factor: float | None = None
    expert_tensor_parallel_size: int | None = None
    moe_flex_dispatcher_backend: Dispatcher | None = None
    overlap_moe_expert_parallel_comm: bool = False
    use_transformer_engine_op_fuser: bool = False
    fp8_param_gather: bool = False
    use_precision_aware_optimizer: bool = False
    distributed_fused_adam: FusedAdam | None = None
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    expandable_segments: bool = False

    def __post_init__(self) -> None:
        self._check_counts("recompute_num_layers", "virtual_pipeline", "make_vocab_size_divisible_by")
        super().__post_init__()
        if (factor := self.moe_expert_capacity_factor) is not None:
            try:
                capacity = float(factor)
            except (TypeError, ValueError):
                capacity = 0.0
            if not 0 < capacity < inf:
                raise SpecError(f"moe_expert_capacity_factor={factor!r} is neither a number above 0 nor None")
            object.__setattr__(self, "moe_expert_capacity_factor", capacity)  # a number, also if given as text
        if self.expert_tensor_parallel_size not in (None, 1):
            raise SpecError(f"expert_tensor_parallel_size={self.expert_tensor_parallel_size!r} is not supported; give "
                            "1, or leave it out")  # fmt: skip
        if self.fp8_recipe and not self.transformer_engine:
            option = f"fp8_recipe={self.fp8_recipe!r} with transformer_engine=False"
            raise SpecError(f"{option}: Megatron's own layers have no fp8; give one of the two")
        if self.use_transformer_engine_op_fuser and self.fp8_recipe != "mxfp8":
            raise SpecError("use_transformer_engine_op_fuser=True needs fp8_recipe='mxfp8', for which its kernels are "
                            "(ops/fused/forward_grouped_mlp.py); give both")  # fmt: skip
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
            raise SpecError(f"recompute_modules={modules!r} is not among {', '.join(sorted(RECOMPUTED))}")
        object.__setattr__(self, "recompute_modules", modules)
        graphed = self.cuda_graph_modules
        graphed = tuple(graphed.split() if isinstance(graphed, str) else graphed)
        if not set(graphed) <= GRAPHED:
            raise SpecError(f"cuda_graph_modules={graphed!r} is not among {', '.join(sorted(GRAPHED))}")
        object.__setattr__(self, "cuda_graph_modules", graphed)
        if self.recompute == "selective" and self.recompute_method:
            raise SpecError(f"recompute_method={self.recompute_method!r} needs recompute='full'")
        if any(set(chunk) - set("EtmL") for chunk in self._chunks):
            raise SpecError(f"pipeline_model_parallel_layout={self.pipeline_model_parallel_layout!r} has other letters "
                            "than E, t, m and L; give chunks such as 'Et*4|(t*4|)*14tmL'")  # fmt: skip

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError if Megatron, or its own layers, do not support an option with the run's fields `given`."""
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
        layers = "Megatron's own layers (transformer_engine=False)"
        if given["attention"] != "eager":
            raise SpecError(f"attention={given['attention']!r}: {layers} support attention='eager' only")
        if given["cp"] > 1:
            raise SpecError(f"cp={given['cp']}: attention of {layers} needs whole sequences "
                            "(dot_product_attention.py); give cp=1, or Transformer Engine's")  # fmt: skip
        if given["sequence_parallel"] and not self.apex:
            raise SpecError(f"sequence_parallel=True with apex=False: {layers} then use PyTorch's norm, which refuses "
                            "it (torch_norm.py); give one of the two")  # fmt: skip

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
        sharded = given["zero"] == 1 or given["dp"] * given["cp"] == 1
        if self.fp8_param_gather and not sharded:
            raise SpecError("fp8_param_gather=True with zero=0: only the distributed optimizer gathers them "
                            "(arguments.py); give zero=1")  # fmt: skip
        option = f"distributed_fused_adam={self.distributed_fused_adam!r} with"
        if self.use_precision_aware_optimizer:
            if self.distributed_fused_adam:
                raise SpecError(f"{option} use_precision_aware_optimizer=True: each is an optimizer; give one")
            option = "use_precision_aware_optimizer=True with"
            if self.fp8_param_gather and self.fp8_recipe == "delayed":
                raise SpecError(f"{option} fp8_param_gather=True and fp8_recipe='delayed' is not supported; leave one "
                                "out")  # fmt: skip
        elif self.distributed_fused_adam is None:
            return
        if not sharded:
            raise SpecError(f"{option} zero=0: it shards states over all data-parallel ranks; give zero=1")
        if given["precision"] != "mixed-bf16":
            raise SpecError(f"{option} precision={given['precision']!r} is not supported here; "
                            "give mixed-bf16")  # fmt: skip

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Set 16-bit weights and matmuls with fp32 main weights; by default nothing is recomputed or sharded."""
        attention = {} if self.transformer_engine else {"attention": "eager"}
        return {
            **attention,
            "precision": "mixed-bf16",
            "checkpointing": self.recompute or given["checkpointing"],
            "virtual_stages": self.virtual_pipeline,
        }

    @property
    def _chunks(self) -> list[str]:
        """The letters of each chunk of the layout (transformer/pipeline_parallel_layer_layout.py), in order."""
        repeat = lambda match: match[1] * int(match[2])  # noqa: E731
        whole = re.sub(r"\(([^()]*)\)\*(\d+)", repeat, self.pipeline_model_parallel_layout or "")
        return re.sub(r"(\w)\*(\d+)", repeat, whole).split("|") if whole else []

    @property
    def mtp_layers(self) -> int:
        """The number of modules for multi-token prediction, all of them in the last stage."""
        return "".join(self._chunks).count("m")

    def layers_of(self, spec: ModelSpec, stages: int) -> tuple[int, ...] | None:
        """Return the number of layers of each stage by the layout, with those for multi-token prediction, or None
        without a layout."""
        counts = [chunk.count("t") + chunk.count("m") for chunk in self._chunks]
        return tuple(sum(counts[stage::stages]) for stage in range(stages)) if counts else None

    @property
    def checks_losses(self) -> bool:
        """Whether the host checks the loss before the backward pass (pretrain_gpt.py, loss_func), gradients before they
        are reduced (core/distributed/param_and_grad_buffer.py, check_grads), and their norm. With one CUDA graph of all
        passes, it does not."""
        return self.cuda_graph_impl != "full_iteration"

    @property
    def counts_tokens_on_host(self) -> bool:
        """Whether the forward pass of experts waits until the host knows the number of tokens of each expert
        (transformer/moe/token_dispatcher.py, _maybe_dtoh_and_synchronize; experts.py). If forward and backward passes
        are interleaved, the host launches one while it waits in the other."""
        ahead = self.cuda_graph_impl == "full_iteration" or self.overlap_moe_expert_parallel_comm
        return self.moe_expert_capacity_factor is None and not ahead

    @property
    def rotates_at_once(self) -> bool:
        """Whether one kernel rotates queries and keys: Transformer Engine's (transformer/transformer_config.py)."""
        return self.transformer_engine and self.apply_rope_fusion

    @property
    def hides_sends(self) -> bool:
        """Whether communication between stages overlaps with the computation of another chunk."""
        return self.overlap_p2p_communication and self.virtual_pipeline > 1

    @property
    def keeps_remainders(self) -> bool:
        """Whether main weights are stored as the 2 bytes that bf16 weights lack, and gradients are used in the dtype in
        which they were accumulated. Of the fp8 recipes, only "delayed" allows it
        (megatron/core/optimizer/optimizer_config.py)."""
        return self.use_precision_aware_optimizer and self.fp8_recipe in (None, "delayed")

    def accumulates_in_fp32(self, dtype: str) -> bool:
        """Whether gradients of a run in `dtype` are accumulated in fp32."""
        enabled = self.accumulate_allreduce_grads_in_fp32
        return dtype == "bf16" if enabled is None else enabled

    def overlap(self, run: Any) -> tuple[str, ...]:
        """Return "data" with overlap_grad_reduce, and "tensor" if tensor parallelism's communication in the backward
        pass overlaps with computation."""
        tensor = run.sequence_parallel or self.async_tensor_model_parallel_allreduce
        return ("data",) * self.overlap_grad_reduce + ("tensor",) * tensor

    def recomputed_blocks(self, run: Any, layers: int) -> int:
        """Return how many of a rank's `layers` are recomputed: with recompute_method="block", the first
        recompute_num_layers of each virtual stage (megatron/core/transformer/transformer_block.py,
        _checkpointed_forward), and otherwise all."""
        if run.checkpointing != "full" or self.recompute_method != "block":
            return layers
        return run.virtual_stages * min(self.recompute_num_layers, layers // run.virtual_stages)

    def check_stages(self, stages: tuple[int, ...]) -> None:
        """Raise SpecError if stages with these numbers of layers cannot be divided into virtual stages."""
        chunks = self.virtual_pipeline
        if self.pipeline_model_parallel_layout:
            return
        # The embedding and the head count as layers of the first and the last stage.
        edge_stages = {0, len(stages) - 1} if min(stages) < max(stages) else set()
        if any((layers + (stage in edge_stages)) % chunks for stage, layers in enumerate(stages)):
            numbers = ", ".join(map(str, stages))
            raise SpecError(f"virtual_pipeline={chunks} does not divide the layers of each stage, {numbers}")

    def check_model(self, spec: ModelSpec, run: Any, stages: tuple[int, ...]) -> None:
        """Raise SpecError if megatron-core cannot train `spec`; `stages` are the numbers of layers per stage."""
        self.check_stages(stages)
        self._check_layout(spec, run)
        self._check_experts(spec, run)
        self._check_attention(spec, run)
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

    def _check_layout(self, spec: ModelSpec, run: Any) -> None:
        if not (chunks := self._chunks):
            return
        letters, given = "".join(chunks), f"pipeline_model_parallel_layout={self.pipeline_model_parallel_layout!r}"
        if run.pp == 1 or len(chunks) != run.pp * self.virtual_pipeline or letters.count("t") != spec.layers:
            raise SpecError(f"{given} has {len(chunks)} chunks with {letters.count('t')} layers; give pp >= 2, "
                            f"pp * virtual_pipeline={run.pp * self.virtual_pipeline} chunks, and the {spec.layers} "
                            f"layers of {spec.name}")  # fmt: skip

    def _check_attention(self, spec: ModelSpec, run: Any) -> None:
        modules = set(self.recompute_modules) if run.checkpointing == "selective" else set()
        missing = (set() if spec.experts else OF_EXPERTS) | (set() if spec.mla else OF_LATENTS)
        if wrong := sorted(modules & missing):
            raise SpecError(f"recompute_modules={wrong[0]!r} with {spec.name}, which has no such module; leave it out")
        if spec.family not in ("deepseek_v3", "gpt_oss"):
            return
        if run.tp * run.cp > 1 or run.lora or run.attention == "eager" or not self.transformer_engine:
            raise SpecError(f"stack='megatron' describes {spec.name} with Transformer Engine's layers and tp=1, cp=1, "
                            "without lora and without attention='eager'; give these, or another stack")  # fmt: skip

    def _check_experts(self, spec: ModelSpec, run: Any) -> None:
        if not spec.experts:
            for option, value in {"cuda_graph_impl": "transformer_engine", "use_transformer_engine_op_fuser": True,
                                  "overlap_moe_expert_parallel_comm": True}.items():  # fmt: skip
                if getattr(self, option) == value:
                    raise SpecError(f"{option}={value!r} with {spec.name} is described for experts only; leave it out")
            if self.moe_expert_capacity_factor is not None:
                option = f"moe_expert_capacity_factor={self.moe_expert_capacity_factor} with {spec.name}"
                raise SpecError(f"{option}, which has no experts; leave it out")
            return
        option = f"stack='megatron' does not support {spec.name}, whose MLPs are experts,"
        if run.expert_tp > 1:
            raise SpecError(f"{option} with tp={run.tp}; give expert_tensor_parallel_size=1, or tp=1, and ep")
        if run.tp > 1 and not run.sequence_parallel:
            raise SpecError(f"{option} with tp={run.tp} and sequence_parallel=False: Megatron-LM refuses it "
                            "(transformer/moe/moe_layer.py); give sequence_parallel=True")  # fmt: skip
        if not self.bias_swiglu_fusion:
            raise SpecError(f"{option} with bias_swiglu_fusion=False; leave it out")
        if run.checkpointing == "selective" and "mlp" in self.recompute_modules:
            raise SpecError(f"{option} with recompute_modules='mlp', which means dense MLPs; leave mlp out")
