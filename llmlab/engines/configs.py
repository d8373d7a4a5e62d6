"""A Training as the settings of the engines that run it: DeepSpeed, Accelerate, and FSDP2.

A field that an engine does not support raises SpecError, instead of being left out. The script sets everything for
which a Training has no field: learning rate, clipping and data. It also creates the model with its adapters, attention
and kernels, and the optimizer, and sets checkpointing, which only FSDP under Accelerate reads from a config.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..base.errors import SpecError


class Settings(Protocol):
    """The fields of a Training that these engines read."""

    @property
    def micro_batch(self) -> int: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def checkpointing(self) -> str | None: ...
    @property
    def zero(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def dp_replicate(self) -> int: ...
    @property
    def sync_each_batch(self) -> bool: ...
    @property
    def reduce_dtype(self) -> str: ...
    @property
    def offload(self) -> str | None: ...
    @property
    def compile(self) -> bool: ...
    @property
    def stack(self) -> Any: ...


DEEPSPEED_COMMON: dict[str, Any] = {
    "gradient_clipping": 0.0,  # the default is 1.0, which would clip gradients
    "zero_allow_untested_optimizer": True,  # such as SGD
    "zero_force_ds_cpu_optimizer": False,  # torch's AdamW is allowed if states are on the CPU
}
# DeepSpeed's sections of each precision (deepspeed/runtime/precision_config.py, torch_autocast.py).
DEEPSPEED_PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {},
    "mixed-fp16": {"fp16": {"enabled": True}},
    "mixed-bf16": {"bf16": {"enabled": True}},
    "autocast-fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "autocast-bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def check_stack(run: Any, why: str, *names: str) -> None:
    """Raise SpecError, with `why`, unless the stack is transformers or one of these `names`."""
    if (name := getattr(run.stack, "name", run.stack)) not in ("transformers", *names):
        raise SpecError(f"stack={name!r}{why}")


def deepspeed_config(run: Settings) -> dict[str, Any]:
    """Return the config for `deepspeed.initialize`. Raises SpecError for a run that DeepSpeed's ZeRO does not
    support."""
    check_stack(run, " is not deepspeed", "deepspeed")
    _data_parallel_alone("DeepSpeed", run)
    _one_copy("DeepSpeed", run)
    if not run.sync_each_batch:
        raise SpecError("sync_each_batch=False with DeepSpeed, which reduces gradients after each micro-batch; leave "
                        "it out")  # fmt: skip
    if run.reduce_dtype != "fp32":
        raise SpecError(f"reduce_dtype={run.reduce_dtype!r} with DeepSpeed: it applies to FSDP; leave it out")
    if run.precision not in DEEPSPEED_PRECISION:
        raise SpecError(
            f"precision={run.precision!r} with DeepSpeed, whose states are fp32; give {', '.join(DEEPSPEED_PRECISION)}"
        )
    zero: dict[str, Any] = {"stage": run.zero}
    if run.offload:
        if run.zero == 0:
            raise SpecError(f"offload={run.offload!r} with zero=0: DeepSpeed offloads sharded states; give zero >= 1")
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if run.offload == "optimizer+parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": run.global_batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.accumulation,
        "zero_optimization": zero,
        **DEEPSPEED_COMMON,
        **DEEPSPEED_PRECISION[run.precision],
    }
    own = run.stack.settings() if hasattr(run.stack, "settings") else {}  # options of stack="deepspeed"
    return config | {section: config.get(section, {}) | options for section, options in own.items()}


def accelerate_config(run: Settings) -> dict[str, Any]:
    """Return the config for `accelerate launch --config_file`, to be written as YAML or JSON, for one machine.

    zero=0 is DDP, zero=3 FSDP2, zero=1 and 2 DeepSpeed. Raises SpecError for a run that these do not support. The
    script has to create its data loader with `micro_batch` sequences, and
    Accelerator(gradient_accumulation_steps=accumulation). FSDP2 then accumulates whole gradients
    (sync_each_batch=False). No key of the config changes this, but the script can, with
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_each_batch=True).
    Accelerate's FSDP2 reduces gradients in 16 bits in mixed precision, whatever `reduce_dtype` is.
    """
    check_stack(run, ": its options are not among Accelerate's settings")
    _data_parallel_alone("Accelerate", run)
    _one_copy("Accelerate", run)
    # DDP runs under autocast. DeepSpeed and FSDP2's policy have fp32 copies or shards, and compute in 16 bits.
    half = "mixed" if run.zero else "autocast"
    own = {"fp32": "no", f"{half}-fp16": "fp16", f"{half}-bf16": "bf16"}
    if run.precision not in own:
        raise SpecError(f"precision={run.precision!r} with Accelerate and zero={run.zero}: give {', '.join(own)}")
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO" if run.dp == 1 else "MULTI_GPU",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": own[run.precision],
        "num_machines": 1,
        "num_processes": run.dp,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if run.zero in (1, 2):
        config["distributed_type"] = "DEEPSPEED"
        config["deepspeed_config"] = {
            "zero_stage": run.zero,
            "gradient_accumulation_steps": run.accumulation,
            "gradient_clipping": 1e30,  # no clipping: without a value Accelerate clips at 1.0, and it ignores 0.0
            "offload_optimizer_device": "cpu" if run.offload else "none",
            "offload_param_device": "none",
            "zero3_init_flag": False,
        }
    elif run.zero == 3:
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": run.offload == "optimizer+parameters",
            "fsdp_activation_checkpointing": run.checkpointing == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        }
        if run.offload == "optimizer":
            raise SpecError("offload='optimizer' with FSDP, which offloads parameters and states together; give both")
    elif run.offload:
        raise SpecError(f"offload={run.offload!r} with zero=0: DDP keeps all on the GPU; give zero >= 1")
    return config


def fsdp_arguments(run: Settings) -> dict[str, Any]:
    """Return the keyword arguments of torch's `fully_shard`; call it for each block, then for the model.

    zero=3 frees a block's gathered parameters after its forward pass; zero=2 keeps them until its backward pass ends.
    With dp_replicate, also pass the mesh: mesh["dp_replicate", "dp_shard"]. Raises SpecError for other stages, and for
    precisions that FSDP2 does not support.
    """
    from torch import bfloat16, float16, float32
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    _data_parallel_alone("FSDP2", run)
    if run.zero not in (2, 3):
        raise SpecError(f"zero={run.zero} with FSDP2, which always shards gradients and states; give zero=2 or 3")
    dtypes = {"fp32": None, "mixed-fp16": float16, "mixed-bf16": bfloat16}
    if run.precision not in dtypes:
        raise SpecError(f"precision={run.precision!r} with FSDP2: give {', '.join(dtypes)}, or call it under autocast")
    if run.offload == "optimizer":
        raise SpecError("offload='optimizer' with FSDP2, which offloads parameters and states together; give both")
    half = dtypes[run.precision]
    reduced = {"fp32": float32, "fp16": float16, "bf16": bfloat16}[run.reduce_dtype]
    return {
        "reshard_after_forward": run.zero == 3,
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half and reduced),
        "offload_policy": CPUOffloadPolicy() if run.offload else OffloadPolicy(),
    }


def _one_copy(engine: str, run: Settings) -> None:
    if run.dp_replicate > 1:
        raise SpecError(f"dp_replicate={run.dp_replicate} with {engine}: this config shards states over all ranks; "
                        "FSDP2 makes copies, by a mesh of two dimensions")  # fmt: skip


def _data_parallel_alone(engine: str, run: Settings) -> None:
    for field in ("tp", "pp", "cp", "ep"):
        if getattr(run, field) > 1:
            raise SpecError(f"{field}={getattr(run, field)} with {engine}: its settings cover data parallelism and "
                            "ZeRO only")  # fmt: skip
    if run.compile:
        raise SpecError(f"compile=True with {engine}: call torch.compile in the script; give compile=False")
