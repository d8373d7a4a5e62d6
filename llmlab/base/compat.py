"""What llmlab uses of other libraries that they do not promise: the names that a new release moves are all here.

Names of torch that are needed from the start are imported below. What the simulator replaces, and what a library that
is imported late must have, is in `NAMES`: `check` looks for it where the patches of that library are installed, once.
A name that is expensive to import, or that somebody may patch before it is called, is looked up by `symbol` where it is
used. Public names of torch (torch.utils.checkpoint, DeviceMesh), its operators (torch.ops.aten._x) and names that a
library exports from its top (peft.LoraConfig) need no entry.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .errors import NotAvailable
from .version import MEGATRON

# By library: the oldest release, tried (torch and transformers) or a floor, and the tested one, as in constraints.txt.
KNOWN = {
    "accelerate": ("1.1.0", "1.15.0"),
    "bitsandbytes": ("0.50.0", "0.50.2"),
    "deepspeed": ("0.16.0", "0.19.8"),
    "liger_kernel": ("0.5.0", "0.8.5"),
    "lightning": ("2.6.1", "2.6.1"),  # not among the constraints: `make stacks`
    "litgpt": ("0.5.13", "0.5.13"),  # likewise
    "megatron": (MEGATRON, MEGATRON),  # not among the constraints: `make stacks`
    "safetensors": ("0.4.5", "0.8.0"),
    "torch": ("2.9.0", "2.13.0"),
    "torchtitan": ("0.2.2", "0.2.2"),  # not among the constraints: `make stacks`
    "torchtune": ("0.6.1", "0.6.1"),  # likewise
    "transformers": ("4.46.3", "5.23.0"),
    "triton": ("3.2.0", "3.9.0"),
}

FSDP = "torch.distributed.fsdp._fully_shard."
PROJECTS = {"megatron": "megatron-core"}  # on PyPI, where it has another name than the package
# By what is installed at once: by module or class, the names in it that are replaced or called.
NAMES: dict[str, dict[str, str]] = {
    "torch": {
        "torch": "Generator get_default_device get_rng_state load save tensor to_dlpack "
        "get_autocast_dtype get_autocast_gpu_dtype is_autocast_enabled set_autocast_dtype set_autocast_enabled",
        "torch.Tensor": "_is_view _make_subclass _make_wrapper_subclass _use_count _version record_stream",
        "torch.UntypedStorage": "_cdata data_ptr resize_",
        "torch._C._functions.AccumulateGrad": "_sequence_nr",
        "torch._VF": "gru lstm rnn_relu rnn_tanh",
        "torch._subclasses.fake_tensor.FakeTensor": "device tolist",
        "torch.amp.autocast_mode": "autocast",
        "torch.autograd": "_engine_run_backward",
        "torch.autograd.graph": "save_on_cpu",
        "torch.library.Library": "_destroy",
        "torch.nn.Module": "_apply",
        "torch.ops.aten.linear.default": "_op_dk _opname _overloadpacket _schema",
        "torch.optim.optimizer": "_default_to_fused_or_foreach _foreach_supported_types "
        "_get_capturable_supported_devices _get_foreach_kernels_supported_devices",
        "torch.profiler.profile": "__init__",
        "torch.serialization": "load save",
        "torch.utils._device": "_device_constructors",
        "torch.utils._foreach_utils": "_foreach_supported_types",
        "torch.utils.data.DataLoader": "_get_iterator",
        "torch.utils.data.dataloader": "_MultiProcessingDataLoaderIter _SingleProcessDataLoaderIter",
        "torch.utils.dlpack": "to_dlpack",
        "torch.version": "cuda",
    },
    "torch._dynamo.convert_frame": {
        "torch._dynamo": "reset",
        "torch._dynamo.convert_frame": "ConvertFrameReturn",
        "torch._dynamo.convert_frame.CatchErrorsWrapper": "__call__",
        "torch._dynamo.exc": "InternalTorchDynamoError",
        "torch._dynamo.output_graph.SubgraphTracer": "create_proxy",
        "torch._dynamo.trace_rules": "add get_torch_obj_rule_map",
        "torch._dynamo.variables.functions": "UserFunctionVariable",
        "torch._dynamo.variables.torch": "TorchInGraphFunctionVariable constant_fold_functions",
        "torch._dynamo.variables.torch_function.SymbolicTorchFunctionState": "__init__",
        "torch._guards.GuardsSet": "add",
        "torch._meta_registrations": "device_hint",
        "torch._subclasses.fake_tensor.FakeTensorMode": "dispatch",
        "torch.nn.modules.module": "_global_forward_hooks _global_forward_pre_hooks _has_any_global_hook",
    },
    "torch._inductor.compile_fx": {
        "torch._dynamo.device_interface.CudaInterface": "Worker current_device get_device_properties",
        "torch._inductor.async_compile.AsyncCompile": "triton",
        "torch._inductor.codecache.PyCodeCache": "load_by_key_path",
        "torch._inductor.compile_fx": "compile_fx compile_fx_inner",
        "torch._inductor.config": "get_config_copy patch",
        "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder": "_add_peephole_patterns run",
        "torch._inductor.fx_passes.pad_mm": "can_pad hint_symbols is_mm_compute_bound should_pad",
        "torch._inductor.runtime.hints.DeviceProperties": "create",
        "torch._inductor.utils": "get_device_tflops get_gpu_dram_gbps",
        "torch._functorch.config": "patch",
        "torch.utils._triton": "triton_hash_with_backend",
    },
    "torch.distributed": {
        "torch._C": "_clear_DTensor_sharding_propagator_cache _get_accelerator",
        "torch.distributed": "init_process_group is_nccl_available",
        "torch.distributed.distributed_c10d": "_CoalescingManager _coalescing_manager _get_pg_default_device "
        "_resolve_process_group all_gather_object broadcast_object_list "
        "gather_object new_group recv_object_list scatter_object_list send_object_list",
        FSDP + "_fsdp_init": "_get_device_from_mesh _get_device_handle _get_managed_states",
        FSDP + "_fsdp_param": "_chunk_with_empty",
        FSDP + "_fsdp_param_group": "foreach_all_gather foreach_all_gather_copy_out foreach_reduce",
        "torch.distributed.fsdp._optim_utils": "_convert_state_with_orig_params _get_pg_default_device",
        "torch.distributed.fsdp._state_dict_utils": "_local_post_state_dict_hook",
        "torch.distributed.fsdp.FullyShardedDataParallel": "__init__",
        "torch.distributed.tensor.DTensor": "_local_tensor",
        "torch.distributed.tensor._random": "_rng_tracker",
        "torch.distributed.tensor._sharding_prop.ShardingPropagator": "_propagate_tensor_meta_non_cached",
        "torch.nn.parallel.distributed": "_verify_param_shape_across_processes",
        "torch.nn.parallel.distributed.DistributedDataParallel": "_pre_forward",
        "torch.testing._internal.distributed.fake_pg": "FakeStore",
    },
    "torch.distributed._symmetric_memory": {
        "torch.distributed._symmetric_memory": "empty enable_symm_mem_for_group rendezvous",
    },
    "torch.distributed.checkpoint": {
        "torch.distributed.checkpoint": "async_save",
        "torch.distributed.checkpoint.default_planner": "_validate_global_plan dedup_save_plans",
        "torch.distributed.checkpoint.filesystem": "_FileSystemWriter",
        "torch.distributed.checkpoint.filesystem.FileSystem": "create_stream ls rename rm_file",
        "torch.distributed.checkpoint.hf_storage": "HuggingFaceStorageWriter",
        "torch.distributed.checkpoint.state_dict_saver": "AsyncSaveResponse async_save save",
    },
    "torch.distributed.pipelining.stage": {
        "torch.distributed.pipelining.stage": "InferenceMode _StageBackwardMeta _StageForwardMeta",
        "torch.distributed.pipelining.stage.PipelineStage": "_recv_meta _send_meta _warmup_backward_result "
        "_warmup_forward_vote",
    },
    "torch.nn.attention.flex_attention": {
        "torch.nn.attention.flex_attention": "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG flex_attention_hop",
    },
    "torch.utils.cpp_extension": {"torch.utils.cpp_extension": "load load_inline"},
    "accelerate.state": {"accelerate.state.AcceleratorState": "_shared_state",
                         "accelerate.state.PartialState": "_shared_state"},
    "bitsandbytes": {
        "bitsandbytes": "matmul",
        "bitsandbytes.autograd._functions": "MatMul8bitLt",
        "bitsandbytes.functional": "fill get_paged name2qmap optimizer_update_32bit prefetch_tensor",
        "bitsandbytes.nn.modules": "has_avx512bf16",
        "bitsandbytes.nn.modules.Int8Params": "__new__ _quantize",
        "bitsandbytes.nn.modules.Params4bit": "__new__ _quantize",
    },
    "accelerate.commands.launch": {
        "accelerate.commands.launch": "deepspeed_launcher default_config_file launch_command launch_command_parser "
        "multi_gpu_launcher sagemaker_launcher simple_launcher tpu_launcher tpu_pod_launcher",
        "accelerate.utils.launch": "is_port_in_use prepare_deepspeed_cmd_env prepare_multi_gpu_env "
        "prepare_simple_launcher_cmd_env",
    },
    "deepspeed.engine": {
        "deepspeed.accelerator.cpu_accelerator": "CPU_Accelerator",
        "deepspeed.accelerator.cuda_accelerator": "CUDA_Accelerator",
        "deepspeed.accelerator.real_accelerator": "ds_accelerator",
        "deepspeed.ops.adagrad.cpu_adagrad": "CPUAdagradBuilder",
        "deepspeed.ops.adam.cpu_adam": "CPUAdamBuilder",
        "deepspeed.ops.adam.fused_adam": "FusedAdamBuilder",
        "deepspeed.ops.lion.cpu_lion": "CPULionBuilder",
        "deepspeed.ops.lion.fused_lion": "FusedLionBuilder",
        "deepspeed.ops.op_builder.builder.OpBuilder": "load",
        "deepspeed.ops.op_builder.cpu.no_impl.NotImplementedBuilder": "load",
        "deepspeed.runtime.engine.DeepSpeedEngine": "_configure_basic_optimizer",
        "deepspeed.runtime.hybrid_engine.DeepSpeedHybridEngine": "__init__",
        "deepspeed.runtime.pipe.dualpipev.DualPipeVEngine": "__init__",
        "deepspeed.runtime.pipe.engine.PipelineEngine": "__init__",
    },
    "deepspeed": {"deepspeed": "initialize"},
    "deepspeed.launcher.runner": {
        "deepspeed.launcher.runner": "fetch_hostfile parse_args parse_inclusion_exclusion",
    },
    "deepspeed.ops": {"deepspeed.ops": "__compatible_ops__"},  # by itself: its import looks for compilers
    "liger_kernel": {"liger_kernel.transformers": "_apply_liger_kernel_to_instance"},
    "safetensors.torch": {"safetensors.torch": "_flatten_as_ptr safe_open serialize_file"},
    "megatron": {
        "megatron.core.distributed": "DistributedDataParallel DistributedDataParallelConfig finalize_model_grads",
        "megatron.core.models.gpt": "GPTModel",
        "megatron.core.models.gpt.gpt_layer_specs": "get_gpt_layer_local_spec",
        "megatron.core.optimizer": "Adam OptimizerConfig USING_PYTORCH_OPTIMIZER get_megatron_optimizer",
        "megatron.core.parallel_state": "destroy_model_parallel initialize_model_parallel is_pipeline_first_stage "
        "is_pipeline_last_stage",
        "megatron.core.pipeline_parallel": "get_forward_backward_func",
        "megatron.core.pipeline_parallel.schedules": "backward_step",
        "megatron.core.tensor_parallel": "model_parallel_cuda_manual_seed",
        "megatron.core.tensor_parallel.random": "_lazy_call",
        "megatron.core.transformer": "TransformerConfig",
        "megatron.core.transformer.module": "Float16Module",
        "megatron.core.transformer.transformer_block": "LayerNormImpl",
        "megatron.core.transformer.utils": "get_default_causal_mask",
        "megatron.core.utils": "get_attr_wrapped_model",
    },
    "torchtitan": {
        "torchtitan.components.quantization.float8": "has_cuda_capability",
        "torchtitan.config": "JobConfig",
        "torchtitan.distributed": "ParallelDims",
        "torchtitan.distributed.activation_checkpoint": "_layer_sac_count",
        "torchtitan.distributed.context_parallel": "_HeadTailLoadBalancer prepare_context_parallel_input",
        "torchtitan.distributed.parallel_dims": "device_type",
        "torchtitan.distributed.utils": "clip_grad_norm_ get_train_context",
        "torchtitan.models.llama3": "get_train_spec",
        "torchtitan.models.moe": "MoEArgs",
        "torchtitan.models.moe.moe": "_run_experts_grouped_mm",
        "torchtitan.models.llama3.infra.parallelize": "_op_sac_save_list",
        "torchtitan.models.qwen3": "get_train_spec",
        "torchtitan.models.qwen3.infra.parallelize": "_op_sac_save_list",
        "torchtitan.protocols.model_converter": "build_model_converters",
        "torch._inductor.config": "emulate_precision_casts patch",
        "torch.utils.checkpoint": "_CachedTorchDispatchMode _sac_storage_key",
        "torch.distributed.tensor.experimental._attention": "_disable_context_parallel_dispatcher "
        "_enable_context_parallel_dispatcher",
    },
    "litgpt": {
        "lightning.fabric": "Fabric",
        "lightning.fabric.strategies": "FSDPStrategy ModelParallelStrategy",
        "litgpt.config": "Config",
        "litgpt.finetune.lora": "parallelize_fn",
        "litgpt.lora": "Config GPT mark_only_lora_as_trainable",
        "litgpt.model": "Block GPT",
        "litgpt.utils": "chunked_cross_entropy",
    },
    "torchtune": {
        "torchtune.models.llama3_1": "llama3_1 lora_llama3_1",
        "torchtune.models.llama3_1._position_embeddings": "Llama3ScaledRoPE",
        "torchtune.models.llama3_2": "llama3_2 lora_llama3_2",
        "torchtune.modules": "TransformerSelfAttentionLayer",
        "torchtune.modules.loss": "CEWithChunkedOutputLoss",
        "torchtune.modules.peft": "get_adapter_params set_trainable_params",
        "torchtune.training": "compile_loss compile_model get_act_offloading_ctx_manager get_shard_conditions "
        "register_optim_in_bwd_hooks scale_grads set_activation_checkpointing set_default_dtype shard_model",
        "torchtune.training._activation_offloading": "torch",
    },
    "transformers.generation.stopping_criteria": {"transformers.generation.stopping_criteria": "EosTokenCriteria"},
    "transformers.generation.utils": {
        "transformers.generation.utils.GenerationMixin": "_beam_search_has_unfinished_sequences _update_finished_beams"
    },
    "transformers.initialization": {"transformers.initialization": "copy_"},
    "transformers.integrations.bitsandbytes": {
        "transformers.core_model_loading": "dot_natural_key",
        "transformers.integrations.bitsandbytes": "Bnb4bitQuantize Bnb8bitQuantize replace_with_bnb_linear",
    },
    "transformers.integrations.sdpa_attention": {"transformers.integrations.sdpa_attention": "use_gqa_in_sdpa"},
    "transformers.masking_utils": {"transformers.masking_utils": "is_tracing"},
    "transformers.modeling_flash_attention_utils": {
        "transformers.modeling_flash_attention_utils": "FLASH_ATTENTION_COMPATIBILITY_MATRIX"
    },
    "transformers flash-attn": {  # where that is there
        "transformers.modeling_flash_attention_utils": "_lazy_imports _pad_input _unpad_input",
    },
    "transformers.modeling_utils": {"transformers.modeling_utils.PreTrainedModel": "_no_split_modules"},
    "triton.runtime.interpreter": {"triton.runtime.interpreter": "GridExecutor interpreter_builder"},
    "triton.runtime.jit": {"triton.runtime.jit.KernelInterface": "__getitem__"},
}  # fmt: skip

# What some releases in `KNOWN` lack, and what is done there without it.
OPTIONAL = frozenset((
    "safetensors.torch._flatten_as_ptr",  # older: _flatten
    "torch.accelerator.get_memory_info",  # since torch 2.10; nothing of torch's own asks for it before
    "torch.utils.checkpoint._sac_storage_key",  # torch 2.13; before it what is not stored is computed
    # Older beam search has no such methods. It branches on the GPU's values, which the simulator refuses by itself.
    "transformers.generation.utils.GenerationMixin._beam_search_has_unfinished_sequences",
    "transformers.generation.utils.GenerationMixin._update_finished_beams",
    "transformers.masking_utils.is_tracing",  # before transformers 5 no fake tensor counts as traced
    "transformers.modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX",  # transformers 5; before it
    # flash-attn is not simulated
))  # fmt: skip

# Private attributes that only instances have, or that llmlab sets for a library to read: no path leads to them.
OF_INSTANCES = frozenset((
    "_allow_unsafe_data_ptr_access",  # FakeTensorMode
    "_attn_implementation",  # a config of transformers
    "_buffers", "_modules", "_parameters",  # nn.Module
    "_cuda_getCurrentRawStream",  # torch._C of a build with CUDA has it
    "_config",  # a stager of torch.distributed.checkpoint
    "_is_hf_initialized", "_is_quantized",  # transformers reads them of a tensor or module, and of a config
    "_is_param",  # torch.nn.Parameter's type reads it of a tensor subclass
))  # fmt: skip


def project_of(library: str) -> str:
    """Return the name by which PyPI has a library of `KNOWN`."""
    return PROJECTS.get(library, library.replace("_", "-"))


def lacks(library: str, name: str) -> NotAvailable:
    """Return the error for `name`, which the installed release of `library` does not have."""
    oldest, newest = KNOWN[library]
    project = project_of(library)
    try:
        installed = torch.__version__ if library == "torch" else version(project)
    except PackageNotFoundError:  # a copy that pip knows nothing of
        installed = "of an unknown version"
    return NotAvailable(
        f"{library} {installed} has no {name}, which llmlab uses; it is there in {library} {newest}, and llmlab knows "
        f"{oldest} to {newest}: pip install {project}=={newest}, or take a newer llmlab"
    )


def symbol(path: str) -> Any:
    """Return what a dotted name of a library in `KNOWN` stands for, as it is at the moment of the call.

    Raises NotAvailable, with the library's version and the missing name.
    """
    names = path.split(".")
    value: Any = import_module(names[0])
    for index, name in enumerate(names[1:], 2):
        here = ".".join(names[:index])
        try:
            # A package may hide its module, as torch.optim does with torch.optim.optimizer.
            value = getattr(value, name) if hasattr(value, name) else import_module(here)
        except ImportError as error:
            raise lacks(names[0], here) from error
    return value


def has(path: str) -> bool:
    """Return whether `path` is there; a path that is not in `OPTIONAL` must be. Raises as `symbol` does."""
    try:
        symbol(path)
    except NotAvailable:
        if path in OPTIONAL:
            return False
        raise
    return True


@cache
def check(part: str) -> None:
    """Raise NotAvailable if one of the `NAMES` of `part` is missing, a library or a module of it: called before it is
    patched. A part that is not listed needs nothing."""
    for place, names in NAMES.get(part, {}).items():
        for name in names.split():
            has(f"{place}.{name}")


try:
    from torch import _C as C
    from torch import _VF as VF
    from torch._C import DisableTorchFunction, DispatchKey, DispatchKeySet
    from torch._C import _AutoDispatchBelowAutograd as AutoDispatchBelowAutograd
    from torch._C import _DisableTorchDispatch as DisableTorchDispatch
    from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeyGuard
    from torch._C import _len_torch_dispatch_stack as len_torch_dispatch_stack
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
        in_kernel_invocation_manager,
    )
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._pytree import arg_tree_leaves, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

    GLOBAL_DEVICE_CONTEXT = torch._GLOBAL_DEVICE_CONTEXT
    current_autograd_node = C._current_autograd_node
    current_graph_task_id = C._current_graph_task_id
    dispatch_get_registrations_for_dispatch_key = C._dispatch_get_registrations_for_dispatch_key
    dispatch_has_kernel_for_dispatch_key = C._dispatch_has_kernel_for_dispatch_key
    get_sequence_nr = torch.autograd._get_sequence_nr
    parse_to = C._nn._parse_to
    set_throw_on_mutable_data_ptr = C._set_throw_on_mutable_data_ptr
    set_warn_deprecated_on_mutable_data_ptr = C._set_warn_deprecated_on_mutable_data_ptr
    storage_use_count = C._storage_Use_Count
except ImportError as error:  # of `from MODULE import NAME`, or of a module that is gone
    match = re.match(r"cannot import name '(\w+)'", str(error))
    raise lacks("torch", f"{error.name}.{match[1]}" if match else str(error.name)) from error
except AttributeError as error:
    raise lacks("torch", f"{getattr(error.obj, '__name__', 'torch')}.{error.name}") from error

__all__ = [
    "AutoDispatchBelowAutograd", "C", "DataDependentOutputException", "DisableTorchDispatch", "DisableTorchFunction",
    "DispatchKey", "DispatchKeySet", "DynamicOutputShapeException", "ELEMENTWISE_TYPE_PROMOTION_KIND",
    "ExcludeDispatchKeyGuard", "FakeTensor", "FakeTensorMode", "FunctionalTensor", "GLOBAL_DEVICE_CONTEXT",
    "HigherOrderOperator",
    "OpOverload", "OpOverloadPacket", "TorchDispatchMode", "UnsupportedOperatorException", "VF", "arg_tree_leaves",
    "check", "current_autograd_node", "current_graph_task_id", "disable_current_modes",
    "dispatch_get_registrations_for_dispatch_key", "dispatch_has_kernel_for_dispatch_key", "elementwise_dtypes",
    "get_sequence_nr", "get_unwrapped", "has", "in_kernel_invocation_manager", "is_functorch_wrapped_tensor", "lacks",
    "len_torch_dispatch_stack", "parse_to", "set_throw_on_mutable_data_ptr",
    "set_warn_deprecated_on_mutable_data_ptr", "storage_use_count", "symbol", "tree_flatten", "tree_leaves",
    "tree_map_only", "tree_unflatten",
]  # fmt: skip
