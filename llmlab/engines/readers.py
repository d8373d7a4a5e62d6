"""Settings of DeepSpeed and Accelerate as fields of a Training: the inverse of `configs`.

A key that the engine does not have, or that has no field in a Training, raises a SpecError that names it. Settings that
change neither memory nor work per step (the learning-rate schedule, logging) are ignored, and so are the sizes of
buckets, unless `given` has stack="deepspeed", which has them as options.
`given` are fields that the settings leave open; a field that both set must have the same value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.errors import NotAvailable, SpecError

Settings = Mapping[str, Any] | str | Path


def _keys(names: str) -> set[str]:
    return set(names.split())


# Keys that are ignored: deepspeed/runtime/constants.py and runtime/zero/config.py of DeepSpeed 0.19.8.
DEEPSPEED_PASSED = _keys(
    "scheduler gradient_clipping steps_per_print wall_clock_breakdown dump_state memory_breakdown prescale_gradients "
    "gradient_predivide_factor communication_data_type zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "flops_profiler comms_logger tensorboard wandb csv_monitor checkpoint"
)
DEEPSPEED_OPTIONAL = _keys("amp activation_checkpointing autotuning")  # ignored if they are off
DEEPSPEED_READ = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer",
                  "zero_optimization", "fp16", "bf16", "torch_autocast"}  # fmt: skip
ZERO_PASSED = _keys(
    "overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions allgather_bucket_size "
    "round_robin_gradients sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
    "ignore_unused_parameters"
)
ZERO_OPTIONS = _keys(
    "contiguous_gradients overlap_comm reduce_bucket_size sub_group_size stage3_prefetch_bucket_size "
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_param_persistence_threshold"
)
# DeepSpeed accepts the settings of stage 3 with and without the prefix.
ZERO_NAMES = {name.removeprefix("stage3_"): name for name in ZERO_PASSED if name.startswith("stage3_")}
DEEPSPEED_HALF = ("mixed-bf16", "mixed-fp16")
ZERO_READ = {"stage", "offload_optimizer", "offload_param"}
DEEPSPEED_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "sgd": "sgd"}

# accelerate/commands/config/config_args.py and utils/launch.py of Accelerate 1.15.0.
ACCELERATE_PASSED = _keys(
    "compute_environment debug machine_rank main_process_ip main_process_port main_training_function num_machines "
    "rdzv_backend same_network downcast_bf16 tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_zone "
    "enable_cpu_affinity gpu_ids use_cpu"
)
ACCELERATE_READ = {"distributed_type", "mixed_precision", "num_processes", "deepspeed_config", "fsdp_config"}
PLUGIN_PASSED = {"gradient_clipping", "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher"}
PLUGIN_READ = {"zero_stage", "gradient_accumulation_steps", "offload_optimizer_device", "offload_param_device"}
FSDP_PASSED = _keys(
    "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_state_dict_type fsdp_cpu_ram_efficient_loading "
    "fsdp_sync_module_states fsdp_use_orig_params fsdp_backward_prefetch fsdp_backward_prefetch_policy "
    "fsdp_forward_prefetch fsdp_min_num_params"
)
FSDP_READ = {"fsdp_version", "fsdp_reshard_after_forward", "fsdp_sharding_strategy", "fsdp_offload_params",
             "fsdp_activation_checkpointing"}  # fmt: skip
FSDP_STAGES = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0}  # FSDP1's name and number


def deepspeed_fields(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Training from DeepSpeed's config (a dict, JSON text or a file) and from `given`.

    Raises SpecError for an unknown key, a key of another engine, an "auto" that `given` does not resolve, and a
    conflict.
    """
    config = read_mapping("DeepSpeed", settings, json.loads)
    also = {"data_types"} if given.get("stack") == "deepspeed" else set()
    known = DEEPSPEED_READ | DEEPSPEED_PASSED | also
    known |= {key for key in DEEPSPEED_OPTIONAL if _is_off(config.get(key))}
    check_keys("DeepSpeed", config, known)
    zero = {ZERO_NAMES.get(key, key): value for key, value in part_of(config, "zero_optimization").items()}
    check_keys("DeepSpeed's zero_optimization", zero, ZERO_READ | ZERO_PASSED)
    entries: dict[str, tuple[str, Any]] = {"zero": ("zero_optimization.stage", zero.get("stage", 0))}
    entries["precision"] = _deepspeed_precision(config, given)
    devices = [part_of(zero, key).get("device", "none") for key in ("offload_optimizer", "offload_param")]
    entries["offload"] = ("zero_optimization.offload_*", _offload("DeepSpeed", *devices))
    if name := part_of(config, "optimizer").get("type"):
        if str(name).lower() not in DEEPSPEED_OPTIMIZERS:
            raise SpecError(f"optimizer.type={name!r} is not supported; give one of "
                            f"{', '.join(sorted(DEEPSPEED_OPTIMIZERS))}")  # fmt: skip
        entries["optimizer"] = ("optimizer.type", DEEPSPEED_OPTIMIZERS[str(name).lower()])
    for field, key in (("micro_batch", "train_micro_batch_size_per_gpu"),
                       ("accumulation", "gradient_accumulation_steps")):  # fmt: skip
        if key in config:
            entries[field] = (key, config[key])
    fields = agreed(entries, given)
    if fields.get("stack") == "deepspeed":
        fields["stack"] = _deepspeed_options(config, zero, fields["precision"])
    return _batches(fields, config.get("train_batch_size"))


def _is_off(value: Any) -> bool:
    """Whether a section is disabled, or sets nothing."""
    return isinstance(value, Mapping) and (value.get("enabled") is False or not any(value.values()))


def _deepspeed_options(config: Mapping[str, Any], zero: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return the options of stack="deepspeed" by name. Raises SpecError for a precision that it does not support."""
    if precision not in DEEPSPEED_HALF:
        problem = f"precision={precision!r} with stack='deepspeed': it is described for {', '.join(DEEPSPEED_HALF)}"
        raise SpecError(f"{problem}; give stack='transformers', or enable bf16")
    options = {key: value for key, value in zero.items() if key in ZERO_OPTIONS and value != "auto"}
    options |= {key: value for key, value in part_of(config, "data_types").items() if key == "grad_accum_dtype"}
    options |= {key: value for key, value in part_of(config, "bf16").items() if key == "immediate_grad_update"}
    parameters = part_of(part_of(config, "optimizer"), "params")
    options |= {key: value for key, value in parameters.items() if key == "torch_adam"}
    return {"name": "deepspeed", **options}


def accelerate_fields(settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Training from Accelerate's config (a dict, YAML text or a file) and from `given`.

    Raises SpecError as `deepspeed_fields` does, and NotAvailable if text has to be read and PyYAML is missing.
    """
    config = read_mapping("Accelerate", settings, read_yaml)
    check_keys("Accelerate", config, ACCELERATE_READ | ACCELERATE_PASSED)
    kind = str(config.get("distributed_type", "NO"))
    kinds = {"NO": None, "MULTI_GPU": None, "DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config"}
    if kind not in kinds:
        raise SpecError(f"distributed_type={kind!r} is not one of {', '.join(kinds)}")
    for section in ("deepspeed_config", "fsdp_config"):
        if config.get(section) and kinds[kind] != section:
            raise SpecError(f"{section} with distributed_type={kind!r}: these are settings of two engines; keep those "
                            "of one")  # fmt: skip
    half = str(config.get("mixed_precision", "no"))
    if half not in ("no", "fp16", "bf16"):
        raise SpecError(f"mixed_precision={half!r} is not one of no, fp16, bf16")
    prefix = "autocast" if kinds[kind] is None else "mixed"
    entries: dict[str, tuple[str, Any]] = {
        "dp": ("num_processes", config.get("num_processes", 1)),
        "precision": ("mixed_precision", "fp32" if half == "no" else f"{prefix}-{half}"),
    }
    if kind == "DEEPSPEED":
        entries |= _plugin(part_of(config, "deepspeed_config"))
    elif kind == "FSDP":
        return until_last(agreed(entries | _fsdp(part_of(config, "fsdp_config")), given))
    return agreed(entries, given)


def until_last(fields: dict[str, Any], sync_each_batch: bool = False) -> dict[str, Any]:
    """Return `fields` with the defaults of Accelerate's FSDP: it reduces gradients only after the last of several
    micro-batches (accelerate/accelerator.py, accumulate and no_sync; transformers/trainer.py), unless
    `sync_each_batch`, and in mixed precision in 16 bits."""
    waits = fields["zero"] >= 2 and fields.get("accumulation", 1) > 1
    # Its plugin's set_mixed_precision uses one dtype for the whole policy (accelerate/utils/dataclasses.py).
    mixed, _, half = fields["precision"].partition("-")
    reduced = half if mixed == "mixed" and fields["zero"] >= 2 else "fp32"
    return {"sync_each_batch": sync_each_batch or not waits, "reduce_dtype": reduced, **fields}


def _plugin(section: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    if "deepspeed_config_file" in section:
        raise SpecError("deepspeed_config_file: the settings are in that file; read it (--from FILE, "
                        "Training.from_deepspeed)")  # fmt: skip
    check_keys("Accelerate's deepspeed_config", section, PLUGIN_READ | PLUGIN_PASSED)
    devices = [section.get(key, "none") for key in ("offload_optimizer_device", "offload_param_device")]
    entries = {"zero": ("zero_stage", section.get("zero_stage", 2)),
            "offload": ("offload_*_device", _offload("Accelerate", *devices))}  # fmt: skip
    if "gradient_accumulation_steps" in section:
        entries["accumulation"] = ("gradient_accumulation_steps", section["gradient_accumulation_steps"])
    return entries


def _fsdp(section: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    check_keys("Accelerate's fsdp_config", section, FSDP_READ | FSDP_PASSED)
    key = "fsdp_reshard_after_forward" if section.get("fsdp_version", 1) == 2 else "fsdp_sharding_strategy"
    value = section.get(key, True if key == "fsdp_reshard_after_forward" else "FULL_SHARD")
    stage = (3 if value else 2) if isinstance(value, bool) else FSDP_STAGES.get(str(value))
    if stage is None:
        raise SpecError(f"{key}={value!r} is not supported; give one of {', '.join(FSDP_STAGES)}")
    offload = "optimizer+parameters" if section.get("fsdp_offload_params") else None
    entries: dict[str, tuple[str, Any]] = {"zero": (key, stage), "offload": ("fsdp_offload_params", offload)}
    if section.get("fsdp_activation_checkpointing"):  # if off, the Trainer may still turn on checkpointing in the model
        entries["checkpointing"] = "fsdp_activation_checkpointing", "full"
    return entries


def _deepspeed_precision(config: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, Any]:
    on = {key: part_of(config, key).get("enabled", False) for key in ("fp16", "bf16", "torch_autocast")}
    if "auto" in on.values():  # the Trainer decides
        return "fp16 / bf16.enabled", "auto"
    chosen = [key for key, enabled in on.items() if enabled]
    if len(chosen) > 1:
        raise SpecError(f"{' and '.join(chosen)} are both enabled, and DeepSpeed allows one; give one")
    if chosen == ["torch_autocast"]:
        dtype = part_of(config, "torch_autocast").get("dtype", "bfloat16")
        short = {"bfloat16": "bf16", "float16": "fp16"}.get(str(dtype).removeprefix("torch."))
        if short is None:
            raise SpecError(f"torch_autocast.dtype={dtype!r} is not one of bfloat16, float16")
        return "torch_autocast", f"autocast-{short}"
    return (f"{chosen[0]}.enabled", f"mixed-{chosen[0]}") if chosen else ("no fp16, bf16", "fp32")


def _offload(engine: str, optimizer: str, parameters: str) -> str | None:
    for device in (optimizer, parameters):
        if device not in ("cpu", "none"):
            raise SpecError(f"{engine} offloads to {device!r}, which is not supported; give cpu or none")
    if parameters == "cpu":
        if optimizer != "cpu":
            raise SpecError(f"{engine} offloads parameters without optimizer states, which is not supported; offload "
                            "both")  # fmt: skip
        return "optimizer+parameters"
    return "optimizer" if optimizer == "cpu" else None


def _batches(fields: dict[str, Any], total: Any) -> dict[str, Any]:
    """Return `fields` with a missing one of micro_batch, accumulation and dp computed from train_batch_size, which is
    their product, as DeepSpeed does. Raises SpecError if they contradict it."""
    if total is None or (total == "auto"):
        return fields
    names = ("micro_batch", "accumulation", "dp")
    missing = [name for name in names if name not in fields]
    if len(missing) > 1 and "dp" in missing:
        raise SpecError(f"train_batch_size={total} is the sum over ranks, whose number the config does not have; give "
                        "dp=")  # fmt: skip
    if missing == ["micro_batch", "accumulation"]:
        fields["accumulation"] = 1  # DeepSpeed's default
        missing = ["micro_batch"]
    known = 1
    for name in names:
        known *= fields.get(name, 1)
    if not isinstance(total, int) or total < 1 or (total % known if missing else total != known):
        shown = " × ".join(f"{name}={fields[name]}" for name in names if name in fields)
        raise SpecError(f"train_batch_size={total!r} does not agree with {shown}")
    return fields | {name: total // known for name in missing}


def agreed(entries: Mapping[str, tuple[str, Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(given)
    for field, (key, value) in entries.items():
        if value == "auto":
            if field not in given:
                raise SpecError(f'{key} is "auto", which the Trainer fills in; give {field}=')
        elif field in given and given[field] != value:
            raise SpecError(f"{field}={given[field]!r} with {key}, which is {value!r}; give one of them")
        else:
            fields[field] = value
    return fields


def check_keys(engine: str, config: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(str(key) for key in config if key not in known):
        if command := next((command for command, keys in RUN_BY.items() if keys <= config.keys()), None):
            raise SpecError(f"these are settings for `{command}`, which llmlab does not read; let that program read "
                            f"them: llmlab run --gpu NAME {command} FILE")  # fmt: skip
        whose = next((name for name, keys in OWN_KEYS.items() if keys & set(unknown) and name != engine), None)
        if whose:
            raise SpecError(f"{', '.join(unknown)} in settings of {engine} are settings of {whose}; keep those of one "
                            "engine")  # fmt: skip
        raise SpecError(f"{engine} settings {', '.join(unknown)} are not supported; leave them out, or check "
                        "how they are spelled")  # fmt: skip


# Keys of settings that only the program itself can read: of Axolotl, LLaMA-Factory and torchtune.
RUN_BY: dict[str, set[str]] = {
    "axolotl train": {"base_model", "datasets"},
    "llamafactory-cli train": {"model_name_or_path", "finetuning_type"},
    "tune run RECIPE --config": {"model", "tokenizer", "checkpointer"},
}
OWN_KEYS = {
    "DeepSpeed": {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"},
    "Accelerate": {"distributed_type", "fsdp_config", "deepspeed_config", "mixed_precision"},
    "torchtitan": {"parallelism", "activation_checkpoint", "job", "lr_scheduler"},
    "the Trainer": {"per_device_train_batch_size", "gradient_checkpointing", "optim"},
}


def part_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise SpecError(f"{key}={section!r} is a {type(section).__name__}; give settings by name")
    return section


def read_mapping(engine: str, settings: Settings, parse: Any) -> Mapping[str, Any]:
    config: Any = settings
    if not isinstance(settings, Mapping):
        text = str(settings)
        if isinstance(settings, Path) or ("\n" not in text and not text.lstrip().startswith("{") and ":" not in text):
            try:
                text = Path(settings).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise SpecError(f"{settings} cannot be read as {engine}'s settings: {error}") from None
        try:
            config = parse(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"not a config of {engine}: {error}") from None
    if not isinstance(config, Mapping):
        raise SpecError(f"a config of {engine} must be settings by name, and this is a {type(config).__name__}")
    return config


def read_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise NotAvailable("reading YAML needs PyYAML: pip install pyyaml, or give the settings as a dict") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None
