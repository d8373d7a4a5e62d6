"""A Training as the settings of Axolotl and LLaMA-Factory, and as Megatron-LM's arguments.

The names are those of Axolotl's config schema (src/axolotl/utils/schemas of 0.18.0, commit 067b021c), LLaMA-Factory's
arguments (src/llamafactory/hparams, commit ff6d4d12 of August 2026) and Megatron-LM's arguments
(megatron/training/arguments.py of 0.20.0, commit d98e8a64). The written settings were parsed by these three versions.
Each function raises SpecError for a run that its settings cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.errors import SpecError
from .configs import check_stack
from .trainer import trainer_arguments


def _data_parallel(tool: str, run: Any) -> None:
    check_stack(run, f" has its own trainer, not that of {tool}")
    for axis in ("tp", "pp", "cp", "ep", "dp_replicate"):
        if getattr(run, axis) > 1:
            raise SpecError(f"{axis}={getattr(run, axis)}: llmlab writes files of {tool} for data parallelism only")
    if run.checkpointing == "selective":
        raise SpecError(f"checkpointing='selective': {tool} has full checkpointing only; give full")
    if run.fp8 or run.attention == "efficient":
        raise SpecError(f"fp8={run.fp8!r}, attention={run.attention!r}: llmlab writes no such settings of {tool}")
    if run.quantization == "gptq":
        raise SpecError(f"quantization='gptq' is AutoGPTQ's layer, and {tool} of today loads such a checkpoint with "
                        "GPT-QModel's; give 'nf4' or 'int8'")  # fmt: skip
    if run.kernels not in (None, "liger"):
        raise SpecError(f"kernels={run.kernels!r}: {tool} has Liger's; give kernels='liger', or none")
    if run.zero or run.offload:
        run.to_deepspeed()  # both read ds_config.json
    elif run.precision.startswith("mixed"):
        raise SpecError(f"precision={run.precision!r} with zero={run.zero}: {tool} has no fp32 copy of half weights")


AXOLOTL_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
# The kernels that the Trainer's use_liger_kernel replaces; the plugin alone replaces none.
AXOLOTL_LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy")


def axolotl_config(run: Any, model: str) -> dict[str, Any]:
    """Return Axolotl's settings, without the learning rate and the data sets, which Axolotl requires."""
    _data_parallel("Axolotl", run)
    if run.precision.startswith("autocast") and run.half_layers != "all":
        given = f"precision={run.precision!r}, half_layers={run.half_layers!r}"
        raise SpecError(f"{given}: Axolotl loads the weights in the dtype that it casts to; give {run.compute_dtype}, "
                        "or for LoRA half_layers='all'")  # fmt: skip
    arguments = trainer_arguments(run)
    settings: dict[str, Any] = {
        "base_model": model, "sequence_len": run.seq_len, "micro_batch_size": run.micro_batch,
        "gradient_accumulation_steps": run.accumulation, "optimizer": arguments["optim"],
        # These also set the dtype of the weights; float16 sets it without autocast.
        "bf16": run.compute_dtype == "bf16", "fp16": arguments["fp16"], "float16": run.precision == "fp16",
        "max_grad_norm": 0.0,
        "gradient_checkpointing": run.checkpointing == "full",
        "attn_implementation": {"flash": "flash_attention_2"}.get(run.attention, run.attention),
        "torch_compile": run.compile, "output_dir": "trained",
    }  # fmt: skip
    if run.lora:
        settings |= {
            "adapter": "qlora" if run.quantization == "nf4" else "lora", "load_in_4bit": run.quantization == "nf4",
            "load_in_8bit": run.quantization == "int8", "lora_r": run.lora.rank,
            "lora_alpha": run.lora.alpha if run.lora.alpha is not None else 2 * run.lora.rank,
            "lora_dropout": run.lora.dropout, "lora_target_modules": list(run.lora.targets),
            **dict.fromkeys(AXOLOTL_LORA_KERNELS, False),  # their default is on
        }  # fmt: skip
    if run.quantization == "nf4":  # its default is true (loaders/model.py)
        settings["bnb_config_kwargs"] = {"bnb_4bit_use_double_quant": run.double_quant}
    if run.checkpointing:
        settings["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if run.kernels == "liger":
        settings |= {"plugins": ["axolotl.integrations.liger.LigerPlugin"], **dict.fromkeys(AXOLOTL_LIGER, True)}
    if run.zero:
        settings["deepspeed"] = "ds_config.json"
    return settings


def llama_factory_config(run: Any, model: str) -> dict[str, Any]:
    """Return LLaMA-Factory's settings, without the learning rate, data set and template."""
    _data_parallel("LLaMA-Factory", run)
    if run.lora and run.precision not in ("bf16", "fp16") and not (run.zero or run.half_layers):
        raise SpecError(f"precision={run.precision!r} with lora: LLaMA-Factory loads a frozen model in half precision; "
                        "give bf16 or fp16, or half_layers='all'")  # fmt: skip
    if run.precision == "fp16" and not run.lora:
        raise SpecError("precision='fp16': LLaMA-Factory trains fp32 weights under autocast; give autocast-fp16")
    settings: dict[str, Any] = {
        "model_name_or_path": model, "stage": "sft", "do_train": True,
        "finetuning_type": "lora" if run.lora else "full", "cutoff_len": run.seq_len, **trainer_arguments(run),
        "flash_attn": {"sdpa": "sdpa", "flash": "fa2", "eager": "disabled"}[run.attention],
        "disable_gradient_checkpointing": run.checkpointing is None, "output_dir": "trained",
    }  # fmt: skip
    settings["enable_liger_kernel"] = settings.pop("use_liger_kernel")
    settings |= {"use_reentrant_gc": False} if run.checkpointing else {}
    if run.precision == "bf16":
        settings["pure_bf16"] = True
    elif run.precision == "fp16":
        settings["fp16"] = True  # the frozen weights have 16 bits, the adapters fp32
    if run.lora:
        settings |= {
            "lora_rank": run.lora.rank, "lora_dropout": run.lora.dropout, "lora_target": ",".join(run.lora.targets),
            "lora_alpha": run.lora.alpha if run.lora.alpha is not None else 2 * run.lora.rank,
        }  # fmt: skip
    if run.quantization:
        settings["quantization_bit"] = {"nf4": 4, "int8": 8}[run.quantization]
        settings["double_quantization"] = run.double_quant
        settings |= {"upcast_layernorm": True} if run.half_layers == "embeddings" else {}
    if run.zero:
        settings["deepspeed"] = "ds_config.json"
    return settings


MEGATRON_FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen3", "qwen3_moe")
MEGATRON_VALUES: dict[str, tuple[object, ...]] = {
    "precision": ("mixed-bf16", "mixed-fp16"), "optimizer": ("adamw",), "zero": (0, 1), "lora": (None,),
    "quantization": (None,), "offload": (None,), "kernels": (None,), "compile": (False,), "fp8": (None,),
    "attention": ("sdpa", "flash", "eager"), "schedule": ("1f1b",),
}  # fmt: skip
TURNED_OFF = {  # the argument of an option that is False
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "bias_swiglu_fusion": "--no-bias-swiglu-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
    "overlap_p2p_communication": "--no-overlap-p2p-communication",
    "transformer_engine": "--transformer-impl local",
}
ELSEWHERE = {  # options that today's Megatron-LM has no argument for, with their defaults
    "distributed_fused_adam": (None, "is NeMo 1's: Megatron-LM has no such argument"),
    "deepspeed": (False, "is Megatron-DeepSpeed, which has other arguments"),
    "async_tensor_model_parallel_allreduce": (True, "is of older releases: Megatron-LM of today has no such argument"),
}


def megatron_arguments(run: Any, spec: Any) -> list[str]:
    """Return the arguments of Megatron-LM's pretrain_gpt.py, one option per text, without those for the learning rate,
    the data and the tokenizer."""
    for field, values in MEGATRON_VALUES.items():
        if getattr(run, field) not in values:
            raise SpecError(f"Megatron-LM with {field}={getattr(run, field)!r} is not supported here")
    check_stack(run, " is not megatron", "megatron")
    if spec.family not in MEGATRON_FAMILIES:
        raise SpecError(f"a model of {spec.family} has no arguments here, only {', '.join(MEGATRON_FAMILIES)}")
    options = run.stack if hasattr(run.stack, "name") else None  # None: Megatron-LM's defaults
    if options is None and run.checkpointing == "selective":
        raise SpecError("checkpointing='selective' of Megatron-LM recomputes less, attention's core alone: give "
                        "stack='megatron', or 'full'")  # fmt: skip
    for field, (default, whose) in ELSEWHERE.items():
        if (value := getattr(options, field, default)) != default:
            raise SpecError(f"{field}={value!r} {whose}; leave it out")
    recompute = getattr(options, "recompute", None) or run.checkpointing
    config = spec.config
    lines = [
        f"--num-layers {spec.layers}", f"--hidden-size {spec.hidden}", f"--ffn-hidden-size {spec.intermediate}",
        f"--num-attention-heads {spec.heads}", f"--seq-length {run.seq_len}",
        f"--max-position-embeddings {max(run.seq_len, spec.max_positions)}",
        f"--micro-batch-size {run.micro_batch}", f"--global-batch-size {run.global_batch}",
        f"--tensor-model-parallel-size {run.tp}", f"--pipeline-model-parallel-size {run.pp}",
        f"--context-parallel-size {run.cp}", f"--{run.compute_dtype}", "--optimizer adam", "--clip-grad 0.0",
        f"--attention-backend {'unfused' if run.attention == 'eager' else 'auto'}",
    ]  # fmt: skip
    own = options is not None and (options.fp8_param_gather or options.use_precision_aware_optimizer)
    lines += ["--use-distributed-optimizer"] if run.zero or own else []
    lines += ["--sequence-parallel"] if run.sequence_parallel else []
    if options is not None and options.pipeline_model_parallel_layout:
        lines.append(f"--pipeline-model-parallel-layout '{options.pipeline_model_parallel_layout}'")
        lines += [f"--mtp-num-layers {options.mtp_layers}"] if options.mtp_layers else []
    elif run.virtual_stages > 1:
        lines.append(f"--num-virtual-stages-per-pipeline-rank {run.virtual_stages}")
    lines += _recompute(recompute, options) if recompute else []
    if options is not None:
        lines.append(f"--make-vocab-size-divisible-by {options.make_vocab_size_divisible_by}")
        lines += ["--tp-comm-overlap"] if options.tp_comm_overlap else []
        if options.overlap_grad_reduce and run.dp > 1:
            gather = " --overlap-param-gather" if run.zero and options.overlap_param_gather else ""
            lines.append(f"--overlap-grad-reduce{gather}")
        if options.cross_entropy_fusion_impl:
            lines.append(f"--cross-entropy-loss-fusion --cross-entropy-fusion-impl {options.cross_entropy_fusion_impl}")
        lines += [argument for field, argument in TURNED_OFF.items() if not getattr(options, field)]
        lines += _fp8(options) if options.fp8_recipe else []
        lines += ["--use-precision-aware-optimizer"] if options.use_precision_aware_optimizer else []
        if options.cuda_graph_impl == "full_iteration":  # the host's check of the loss would break the graph
            lines.append("--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad")
        elif options.cuda_graph_impl:
            modules = " ".join(options.cuda_graph_modules)
            lines.append(f"--cuda-graph-impl {options.cuda_graph_impl} --cuda-graph-modules {modules}")
        if options.defer_embedding_wgrad_compute:
            limit = f"--wgrad-deferral-limit {options.wgrad_deferral_limit}"
            lines.append(f"--defer-embedding-wgrad-compute {limit}")
    lines += [] if spec.tied else ["--untie-embeddings-and-output-weights"]
    if spec.family == "gpt2":
        return [*lines, "--position-embedding-type learned_absolute"]
    lines += [f"--group-query-attention --num-query-groups {spec.kv_heads}"] if spec.kv_heads != spec.heads else []
    if spec.experts:  # no auxiliary loss, as in transformers
        lines += [f"--num-experts {spec.experts}", f"--moe-router-topk {spec.experts_per_token}",
                  "--moe-router-load-balancing-type none", "--moe-grouped-gemm",
                  f"--expert-model-parallel-size {run.ep}", f"--moe-ffn-hidden-size {spec.moe_intermediate}"]
        capacity = getattr(options, "moe_expert_capacity_factor", None)
        if capacity is not None:
            lines.append(f"--moe-expert-capacity-factor {capacity} --moe-pad-expert-input-to-capacity")
        lines += _dispatch(options) if options is not None else []
    if spec.qkv_bias or spec.mlp_bias or (spec.sliding_window and run.seq_len > spec.sliding_window):
        raise SpecError("biases, and a window shorter than the sequence, are not among the arguments that are written")
    lines += ["--qk-layernorm"] if spec.qk_norm else []
    lines += [f"--kv-channels {spec.head_dim}"] if spec.head_dim * spec.heads != spec.hidden else []
    return [*lines, "--swiglu", "--normalization RMSNorm", f"--norm-epsilon {config.get('rms_norm_eps', 1e-5)}",
            "--disable-bias-linear", "--position-embedding-type rope", *_rotary(config),
            "--attention-dropout 0.0", "--hidden-dropout 0.0"]  # fmt: skip


def _rotary(config: Mapping[str, Any]) -> list[str]:
    """Return the arguments for the base and the scaling of rotary positions."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = config.get("rope_theta") or rope.get("rope_theta", 10000)
    kind, factor = rope.get("rope_type") or rope.get("type") or "default", rope.get("factor", 1.0)
    stretched = {
        "default": [],
        "linear": [f"--rotary-seq-len-interpolation-factor {int(factor)}"],
        "llama3": ["--use-rope-scaling", f"--rope-scaling-factor {factor}"],
    }
    if kind not in stretched or (kind == "linear" and factor != int(factor)):
        raise SpecError(f"rotary positions of type {kind!r}, factor {factor}, are not among the arguments")
    return [f"--rotary-base {int(base)}", *stretched[kind]]


def _fp8(options: Any) -> list[str]:
    lines = [f"--fp8-format hybrid --fp8-recipe {options.fp8_recipe}"]
    if options.fp8_param_gather:
        lines.append("--fp8-param-gather")
        lines += ["--reuse-grad-buf-for-mxfp8-param-ag"] if options.fp8_recipe == "mxfp8" else []
    return lines


def _dispatch(options: Any) -> list[str]:
    lines = ["--expert-tensor-parallel-size 1"] if options.expert_tensor_parallel_size else []
    if backend := options.moe_flex_dispatcher_backend:
        lines.append(f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {backend}")
    lines += ["--overlap-moe-expert-parallel-comm"] if options.overlap_moe_expert_parallel_comm else []
    if options.use_transformer_engine_op_fuser:
        lines.append("--use-transformer-engine-op-fuser --moe-mlp-glu-interleave-size 32")
    return lines


def _recompute(kind: str, options: Any) -> list[str]:
    lines = [f"--recompute-granularity {kind}"]
    if kind == "selective":
        return [*lines, f"--recompute-modules {' '.join(getattr(options, 'recompute_modules', ('core_attn',)))}"]
    method = getattr(options, "recompute_method", None) or "uniform"
    layers = getattr(options, "recompute_num_layers", 1)
    return [*lines, f"--recompute-method {method}", f"--recompute-num-layers {layers}"]
