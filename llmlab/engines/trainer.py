"""A Training as arguments of transformers' Trainer, and those arguments as fields of a Training.

The names are those of transformers 5 (transformers/training_args.py). The arguments do not contain the properties of
the model: its attention, the dtype in which it was loaded, adapters and quantization.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Protocol

from ..base.errors import NotAvailable, SpecError
from .readers import agreed, deepspeed_fields, part_of, read_mapping, until_last


class Settings(Protocol):
    """The fields of a Training that become the Trainer's arguments."""

    @property
    def micro_batch(self) -> int: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def compile(self) -> bool: ...
    @property
    def kernels(self) -> str | None: ...


# The names of each optimizer: the first is written, and all are read (transformers/training_args.py, OptimizerNames).
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": ("adamw_torch",),
    "adamw-fused": ("adamw_torch_fused",),
    "adamw-8bit": ("adamw_bnb_8bit", "adamw_8bit"),
    "adafactor": ("adafactor",),
    "sgd": ("sgd",),
    "lion": ("lion_32bit",),
}


def trainer_arguments(run: Settings) -> dict[str, Any]:
    """Return the keyword arguments of TrainingArguments for `run`, except those for ZeRO and for the model."""
    if run.optimizer not in OPTIMIZERS:
        raise SpecError(f"optimizer={run.optimizer!r}: TrainingArguments has {', '.join(OPTIMIZERS)}")
    half = run.precision.rpartition("-")[2] if "-" in run.precision else ""
    return {
        "per_device_train_batch_size": run.micro_batch,
        "gradient_accumulation_steps": run.accumulation,
        "bf16": half == "bf16",
        "fp16": half == "fp16",
        "optim": OPTIMIZERS[run.optimizer][0],
        "max_grad_norm": 0.0,  # no clipping; the default is 1.0
        "torch_compile": run.compile,
        "use_liger_kernel": run.kernels == "liger",
    }


def trainer_fields(arguments: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Training from a TrainingArguments, its to_dict(), JSON text or a file, and from `given`.

    Raises SpecError for names that TrainingArguments does not have, for settings of two engines, and for a conflict
    with `given`, and NotAvailable if transformers is missing and names have to be checked.
    """
    values = _values(arguments)
    deepspeed, fsdp = values.get("deepspeed"), values.get("fsdp")
    if deepspeed and fsdp:
        raise SpecError("deepspeed and fsdp are both set; give one of them")
    halves = [half for half in ("bf16", "fp16") if values.get(half)]
    if len(halves) > 1:
        raise SpecError("bf16 and fp16 are both set; give one of them")
    accumulation = _accumulation(values.get("accelerator_config"))
    entries: dict[str, tuple[str, Any]] = {
        "micro_batch": ("per_device_train_batch_size", values.get("per_device_train_batch_size", 8)),
        "accumulation": ("gradient_accumulation_steps",
                         accumulation.get("num_steps", values.get("gradient_accumulation_steps", 1))),
        "optimizer": ("optim", _optimizer(values.get("optim", "adamw_torch_fused"))),
        "compile": ("torch_compile", bool(values.get("torch_compile"))),
        "kernels": ("use_liger_kernel", "liger" if values.get("use_liger_kernel") else None),
    }
    if values.get("gradient_checkpointing") or values.get("activation_checkpointing"):
        entries["checkpointing"] = ("gradient_checkpointing", "full")
    if values.get("max_length"):  # SFTConfig's
        entries["seq_len"] = ("max_length", values["max_length"])
    if deepspeed:
        return _with_deepspeed(deepspeed, halves, entries, given)
    if fsdp:
        entries |= _fsdp(fsdp, values.get("fsdp_config"))
    if halves:
        entries["precision"] = (halves[0], f"{'mixed' if fsdp else 'autocast'}-{halves[0]}")
    elif "precision" not in given:
        entries["precision"] = ("no bf16, fp16", "fp32")
    fields = agreed(entries, given)
    return until_last(fields, bool(accumulation.get("sync_each_batch"))) if fsdp else fields


def _values(arguments: Any) -> Mapping[str, Any]:
    if not isinstance(arguments, (Mapping, str, Path)):
        known = getattr(type(arguments), "__dataclass_fields__", {})
        if "per_device_train_batch_size" not in known:
            raise SpecError(f"a {type(arguments).__name__} is not TrainingArguments; give one, its to_dict(), or a "
                            "file")  # fmt: skip
        return {name: getattr(arguments, name, None) for name in known}
    values = read_mapping("the Trainer", arguments, json.loads)
    try:
        from transformers import TrainingArguments
    except ImportError:
        raise NotAvailable("checking the Trainer's arguments needs transformers: pip install 'llmlab[torch]'") from None
    names = {f.name for f in fields_of(TrainingArguments)}
    if unknown := sorted(str(name) for name in values if name not in names and name != "max_length"):
        raise SpecError(f"TrainingArguments has no {', '.join(unknown)}; check the spelling")
    return values


def _accumulation(config: Any) -> Mapping[str, Any]:
    """Return gradient_accumulation_kwargs of an accelerator_config, which is an AcceleratorConfig, a dict, or a JSON
    file."""
    if isinstance(config, (str, Path)):
        config = read_mapping("Accelerate", config, json.loads)
    elif not isinstance(config, Mapping):
        config = {"gradient_accumulation_kwargs": getattr(config, "gradient_accumulation_kwargs", None)}
    return part_of(config, "gradient_accumulation_kwargs")


def _optimizer(name: Any) -> str:
    word = str(getattr(name, "value", name))
    for ours, theirs in OPTIMIZERS.items():
        if word in theirs:
            return ours
    known = ", ".join(name for theirs in OPTIMIZERS.values() for name in theirs)
    raise SpecError(f"optim={word!r} is not supported; give one of {known}")


def _with_deepspeed(
    config: Any, halves: list[str], entries: dict[str, tuple[str, Any]], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a run with DeepSpeed, whose "auto" settings get the values of the Trainer's arguments."""
    fields = agreed(entries, given)
    if "precision" not in fields:
        fields["precision"] = f"mixed-{halves[0]}" if halves else "fp32"
    settings = read_mapping("DeepSpeed", config, json.loads)
    if "precision" not in given and "auto" not in json.dumps([settings.get("fp16"), settings.get("bf16")]):
        del fields["precision"]  # DeepSpeed's own settings have it
    if not settings.get("optimizer"):
        if given.get("stack") == "deepspeed" and fields["optimizer"] == "adamw-fused":
            fields["optimizer"] = "adamw"  # its stack updates in place, like a fused one
        return deepspeed_fields(settings, fields)
    del fields["optimizer"]
    return deepspeed_fields(settings, fields | {key: given[key] for key in ("optimizer",) if key in given})


def _fsdp(fsdp: Any, config: Any) -> dict[str, tuple[str, Any]]:
    words = " ".join(str(getattr(word, "value", word)) for word in fsdp) if isinstance(fsdp, list) else str(fsdp)
    stages = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "True": 3}
    chosen = [stages[word] for word in words.split() if word in stages]
    if len(chosen) != 1:
        raise SpecError(f"fsdp={words!r} is not supported; give one of {', '.join(stages)}")
    options = config if isinstance(config, Mapping) else {}
    stage = 2 if options.get("reshard_after_forward") is False else chosen[0]
    offload = "offload" in words.split() or bool(options.get("cpu_offload"))
    entries: dict[str, tuple[str, Any]] = {
        "zero": ("fsdp", stage), "offload": ("fsdp", "optimizer+parameters" if offload else None)
    }  # fmt: skip
    if options.get("activation_checkpointing"):
        entries["checkpointing"] = ("fsdp_config.activation_checkpointing", "full")
    return entries
