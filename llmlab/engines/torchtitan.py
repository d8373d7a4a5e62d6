"""A Training as torchtitan's TOML, and the TOML as fields of a Training.

The names and defaults are those of RELEASE (torchtitan/config/job_config.py); 0.3 replaces TOML by Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from ..base.errors import SpecError
from .configs import check_stack
from .readers import agreed, check_keys, part_of, read_mapping

RELEASE = "0.2.2"
# The presets that torchtitan has, each with its name and flavor there (torchtitan/models/*/__init__.py).
FLAVORS = {
    "meta-llama/Llama-3.1-8B": ("llama3", "8B"), "meta-llama/Llama-3.1-70B": ("llama3", "70B"),
    "meta-llama/Llama-3.1-405B": ("llama3", "405B"), "Qwen/Qwen3-0.6B": ("qwen3", "0.6B"),
    "Qwen/Qwen3-1.7B": ("qwen3", "1.7B"), "Qwen/Qwen3-4B": ("qwen3", "4B"), "Qwen/Qwen3-8B": ("qwen3", "8B"),
    "Qwen/Qwen3-14B": ("qwen3", "14B"), "Qwen/Qwen3-32B": ("qwen3", "32B"),
}  # fmt: skip
DEGREES = {
    "tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
}  # fmt: skip
# By torch's name: the run's schedule and its number of virtual stages.
SCHEDULES = {"1F1B": ("1f1b", 1), "GPipe": ("gpipe", 1), "Interleaved1F1B": ("1f1b", 2)}
FP8 = "quantize.linear.float8"  # section, and converter
GATHERED = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
# The keys that are read, by section. Below, the keys and whole sections that are ignored, because they change neither
# memory nor work.
READ: dict[str, set[str]] = {
    "model": {"name", "flavor", "converters"},
    "optimizer": {"name", "implementation"},
    "training": {"local_batch_size", "global_batch_size", "seq_len", "dtype", "mixed_precision_param",
                 "enable_cpu_offload"},
    "parallelism": {"data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
                    "pipeline_parallel_microbatch_size", "pipeline_parallel_schedule", "expert_tensor_parallel_degree",
                    *DEGREES.values()},
    "activation_checkpoint": {"mode", "selective_ac_option"},
    "compile": {"enable", "components"},
    "quantize": {"linear"},
}  # fmt: skip
IGNORED_KEYS: dict[str, set[str]] = {
    "model": {"hf_assets_path", "tokenizer_path", "print_after_conversion"},
    "optimizer": {"lr", "beta1", "beta2", "eps", "weight_decay"},
    "training": {"dataset", "dataset_path", "max_norm", "steps", "mixed_precision_reduce", "gc_freq", "gc_debug",
                 "dataloader", "deterministic", "seed", "debug_moe_force_load_balance"},
    "parallelism": {"context_parallel_load_balancer"},
    "activation_checkpoint": {"early_stop", "preserve_rng_state", "determinism_check", "debug"},
    "compile": {"backend"},
    "quantize": set(),
}  # fmt: skip
CHANGES_MEMORY = (  # keys that must have their default, because other values change memory
    ("parallelism", "disable_loss_parallel", False),
    ("parallelism", "enable_async_tensor_parallel", False),
    ("parallelism", "context_parallel_rotate_method", "allgather"),
    ("activation_checkpoint", "per_op_sac_force_recompute_mm_shapes_by_fqns", ["moe.router.gate"]),
)
PASSED_SECTIONS = {"job", "profiling", "metrics", "lr_scheduler", "checkpoint", "comm", "memory_estimation",
                   "fault_tolerance", "experimental", "validation", "debug"}  # fmt: skip


def torchtitan_config(run: Any, name: str) -> dict[str, dict[str, Any]]:
    """Return the sections of the job config for the Training `run` of the preset `name`, without the learning rate.

    Raises SpecError for a model without a flavor in torchtitan, and for a run that torchtitan does not support.
    """
    _check(run, name)
    options = run.stack  # "transformers" has no options
    model, flavor = FLAVORS[name]
    sharded = run.zero >= 2
    # With a pipeline, torchtitan divides the batch of a rank into micro-batches; without one, it accumulates.
    staged = run.pp > 1
    ac = getattr(options, "ac", None) or {None: "none", "full": "full", "selective": "selective_op"}[run.checkpointing]
    mode, _, how = ac.partition("_")
    recomputed: dict[str, Any] = {"mode": mode}
    if mode == "selective":
        recomputed["selective_ac_option"] = "op" if how == "op" else str(getattr(options, "every", 2))
    reshard = getattr(options, "reshard_after_forward", "default")
    if reshard == "default" and sharded and (run.zero == 3) == staged:  # "default" differs with pp
        reshard = "always" if staged else "never"
    compiled = {} if getattr(options, "compile_loss", True) else {"components": ["model"]}
    sections: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": "./outputs"},
        "model": {"name": model, "flavor": flavor, "hf_assets_path": f"./assets/hf/{name.rpartition('/')[2]}",
                  **({"converters": [FP8]} if run.fp8 else {})},
        "optimizer": {"name": "AdamW", "implementation": getattr(options, "optimizer", "foreach")},
        "training": {
            "local_batch_size": run.micro_batch * (run.accumulation if staged else 1),
            "global_batch_size": run.global_batch, "seq_len": run.seq_len, "dtype": "float32",
            "mixed_precision_param": "float32" if run.precision == "fp32" else "bfloat16",
        },
        "parallelism": {
            "data_parallel_replicate_degree": run.dp_replicate if sharded else run.dp,
            "data_parallel_shard_degree": run.dp_shard if sharded else 1,
            "fsdp_reshard_after_forward": reshard,
            **{key: getattr(run, field) for field, key in DEGREES.items()},
            **({"pipeline_parallel_microbatch_size": run.micro_batch, "pipeline_parallel_schedule": schedule_name(run)}
               if staged else {}),
        },
        "activation_checkpoint": recomputed,
        "compile": {"enable": run.compile, **compiled},
    }  # fmt: skip
    if run.gathers_float8:  # the recipe "tensorwise" alone does not
        sections[FP8] = dict.fromkeys(GATHERED, True)
    elif run.fp8:
        sections[FP8] = {"recipe_name": run.fp8}
    return sections


def schedule_name(run: Any) -> str:
    """Return torch's name of the run's schedule. Raises SpecError for one that torchtitan does not support."""
    for name, order in SCHEDULES.items():
        if order == (run.schedule, run.virtual_stages):
            return name
    raise SpecError(f"virtual_stages={run.virtual_stages}: torchtitan interleaves two per rank; give 1 or 2")


def _check(run: Any, name: str) -> None:
    if name not in FLAVORS:
        raise SpecError(f"torchtitan has no flavor of {name}, only of {', '.join(FLAVORS)}")
    check_stack(run, " is not torchtitan", "torchtitan")
    wanted: dict[str, tuple[str | None, ...]] = {
        "lora": (None,), "quantization": (None,), "offload": (None,), "kernels": (None,), "optimizer": ("adamw",),
        "attention": ("sdpa",),
    }  # fmt: skip
    wanted["precision"] = ("mixed-bf16", "fp32") if run.zero else ("autocast-bf16", "fp32")
    for field, values in wanted.items():
        if getattr(run, field) not in values:
            only = ", ".join(value or "none" for value in values)
            raise SpecError(f"torchtitan has no {field}={getattr(run, field)!r}, only {only}")
    if run.zero == 1:
        raise SpecError("torchtitan has no zero=1, only 0 (copies), 2 and 3 (FSDP2)")
    if not run.sync_each_batch:
        raise SpecError("torchtitan has no sync_each_batch=False: it reduces gradients after each micro-batch")
    if run.reduce_dtype != "fp32":
        raise SpecError(f"torchtitan has no reduce_dtype={run.reduce_dtype!r}: mixed_precision_reduce is float32")
    if run.tp > 1 and not run.sequence_parallel:
        raise SpecError("torchtitan's tensor parallelism divides norms too: give sequence_parallel=True")


def torchtitan_fields(settings: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Training from torchtitan's TOML (a dict, text or a file) and from `given`.

    Raises SpecError for an unknown section or key, another engine's settings, settings that have no field in a
    Training, and a conflict.
    """
    config = read_mapping("torchtitan", settings, _toml)
    check_keys("torchtitan", config, set(READ) | PASSED_SECTIONS)
    parts = {name: part_of(config, name) for name in READ}
    for name, keys in parts.items():
        refused = {key for section, key, _ in CHANGES_MEMORY if section == name}
        check_keys(f"torchtitan's {name}", keys, READ[name] | IGNORED_KEYS[name] | refused)
    training, parallel = parts["training"], parts["parallelism"]
    if training.get("enable_cpu_offload"):
        raise SpecError("enable_cpu_offload=true is not supported here; leave it out")
    for section, key, default in CHANGES_MEMORY:
        if (value := parts[section].get(key, default)) != default:
            raise SpecError(f"{key}={value!r} is not supported here; leave it out, or give {default!r}")
    if parallel.get("expert_tensor_parallel_degree", 1) != 1:
        raise SpecError(f"expert_tensor_parallel_degree={parallel['expert_tensor_parallel_degree']!r}: a Training has "
                        "only expert_parallel_degree")  # fmt: skip
    if (name := parts["optimizer"].get("name", "AdamW")) != "AdamW":
        raise SpecError(f"optimizer.name={name!r} is not supported here; give AdamW")
    if training.get("dtype", "float32") != "float32":
        raise SpecError(f"training.dtype={training['dtype']!r} is not supported here; give float32")
    degrees = {field: parallel.get(key, 1) for field, key in DEGREES.items()}
    fields = _ranks(parallel, degrees["pp"], given)
    half = training.get("mixed_precision_param", "bfloat16") == "bfloat16"
    amp = "mixed-bf16" if fields["zero"] else "autocast-bf16" if degrees["tp"] * degrees["pp"] == 1 else "fp32"
    entries: dict[str, tuple[str, Any]] = {key: (DEGREES[key], value) for key, value in degrees.items()}
    entries |= {key: ("parallelism", value) for key, value in fields.items()}
    entries |= {
        "precision": ("training.mixed_precision_param", amp if half else "fp32"),
        "seq_len": ("training.seq_len", training.get("seq_len", 2048)),
        "sequence_parallel": ("tensor_parallel_degree", degrees["tp"] > 1),
        "compile": ("compile.enable", bool(parts["compile"].get("enable", False))),
        "fp8": (FP8, _fp8(parts["model"], parts["quantize"])),
    }
    named = parallel.get("pipeline_parallel_schedule", "1F1B")
    orders = {name.lower(): order for name, order in SCHEDULES.items()}  # torch ignores case
    if degrees["pp"] > 1 and str(named).lower() not in orders:
        raise SpecError(f"pipeline_parallel_schedule={named!r} is not supported here; give one of "
                        f"{', '.join(SCHEDULES)}")  # fmt: skip
    order = orders[str(named).lower()] if degrees["pp"] > 1 else SCHEDULES["1F1B"]
    entries |= {field: ("pipeline_parallel_schedule", value)
             for field, value in zip(("schedule", "virtual_stages"), order, strict=True)}  # fmt: skip
    entries |= _batch(training, parallel, fields["dp"], degrees["pp"])
    ac, mode = _recomputed(parts["activation_checkpoint"])
    entries["checkpointing"] = ("activation_checkpoint.mode", mode)
    option = parts["optimizer"].get("implementation", "fused")
    reshard = parallel.get("fsdp_reshard_after_forward", "default")
    if option not in ("fused", "foreach"):
        raise SpecError(f"optimizer.implementation={option!r} is not supported here; give fused or foreach")
    if "stack" not in given:
        text = f"torchtitan:{ac},optimizer={option},reshard_after_forward={reshard}"
        if entries["fp8"][1] == "tensorwise" and not _float8(parts["quantize"]).get(GATHERED[0]):
            text += f",{GATHERED[0]}=False"
        if "loss" not in parts["compile"].get("components", ["model", "loss"]):
            text += ",compile_loss=False"
        given = {**given, "stack": text}
    return agreed(entries, given)


def _ranks(parallel: Mapping[str, Any], pp: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return dp, dp_replicate and zero. A shard degree of -1 (all remaining ranks) is computed from dp in `given`."""
    copies, shards = (parallel.get(f"data_parallel_{what}_degree", default)
                      for what, default in (("replicate", 1), ("shard", -1)))  # fmt: skip
    if shards == -1:
        if "dp" not in given:
            raise SpecError("data_parallel_shard_degree=-1 means all remaining ranks; give dp=")
        shards = given["dp"] // copies
    if shards == 1 and parallel.get("context_parallel_degree", 1) == 1:  # FSDP's mesh is dp_shard times cp
        return {"dp": copies, "dp_replicate": 1, "zero": 0}
    never = parallel.get("fsdp_reshard_after_forward", "default") in (("never", "default") if pp > 1 else ("never",))
    return {"dp": copies * shards, "dp_replicate": copies, "zero": 2 if never else 3}


def _batch(training: Mapping[str, Any], parallel: Mapping[str, Any], dp: int, pp: int) -> dict[str, tuple[str, Any]]:
    local, total = training.get("local_batch_size", 8), training.get("global_batch_size", -1)
    micro = parallel.get("pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    rank = local if total == -1 else total // dp if isinstance(total, int) else 0
    if rank < 1 or rank % local or local % micro or (total != -1 and total % dp):
        raise SpecError(f"global_batch_size={total!r} does not agree with local_batch_size={local!r} on dp={dp} ranks, "
                        f"in micro-batches of {micro!r}")  # fmt: skip
    return {"micro_batch": ("local_batch_size", micro), "accumulation": ("global_batch_size", rank // micro)}


def _recomputed(section: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the option `ac` of torchtitan's stack, as text, and the field `checkpointing`."""
    mode, option = section.get("mode", "selective"), str(section.get("selective_ac_option", "2"))
    if mode in ("none", "full"):
        return f"ac={mode}", None if mode == "none" else "full"
    if mode != "selective" or not re.fullmatch(r"op|[1-9]\d*", option):
        raise SpecError(f"activation_checkpoint mode={mode!r}, selective_ac_option={option!r} is not supported here; "
                        "give none, full, and selective with 'op' or every how many layers")  # fmt: skip
    return ("ac=selective_op" if option == "op" else f"ac=selective_layers,every={option}"), "selective"


def _fp8(model: Mapping[str, Any], quantize: Mapping[str, Any]) -> str | None:
    converters = model.get("converters") or []
    if unknown := [name for name in converters if name != FP8]:
        raise SpecError(f"model.converters {', '.join(map(str, unknown))} are not supported here; give {FP8}")
    settings = _float8(quantize)
    return str(settings.get("recipe_name") or "tensorwise") if converters else None


def _float8(quantize: Mapping[str, Any]) -> Mapping[str, Any]:
    return part_of(part_of(quantize, "linear"), "float8")


def _toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)
