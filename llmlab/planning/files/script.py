"""train.py of a run: plain PyTorch (FSDP2, DDP, or one GPU), transformers' Trainer, or TRL's SFTTrainer for adapters.

The script's constants are written from the run, and the rest comes from the train_*.txt files in this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pprint import pformat
from typing import Any

from ...base.errors import SpecError
from ...engines.trainer import trainer_arguments
from ...specs.model import ModelSpec
from ...specs.run import Training, stack_of
from ...specs.stacks import DeepSpeed

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
WHAT = {
    "pytorch": "plain PyTorch",
    "trainer": "transformers' Trainer",
    "sft": "TRL's SFTTrainer, adapters on a frozen model",
}
NEEDS = {
    "pytorch": ("torch", "transformers"), "trainer": ("torch", "transformers", "accelerate"),
    "sft": ("torch", "transformers", "accelerate", "peft", "trl", "datasets"),
}  # fmt: skip
IMPORTS = {
    "pytorch": "import argparse\nimport os\nimport sys\nfrom contextlib import nullcontext\n",
    "trainer": "import argparse\nimport os\nimport sys\n",
}


def kind(run: Training) -> str:
    """Return the script that trains `run`: "pytorch", "trainer" or "sft". Raises SpecError if none of them can."""
    if (stack := stack_of(run)).own_model:
        raise SpecError(f"stack={stack.name!r} has its own training program")
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(run, axis) > 1:
            raise SpecError(f"{axis}={getattr(run, axis)}: the script supports data parallelism and ZeRO only")
    if run.fp8:
        raise SpecError(f"fp8={run.fp8!r}: the script does not convert layers to fp8")
    if run.kernels not in (None, "liger"):
        raise SpecError(f"kernels={run.kernels!r}: the script has Liger's kernels only; give kernels='liger', or none")
    if run.attention == "efficient":
        raise SpecError(
            "attention='efficient': transformers has no such option; give attention='sdpa', where torch "
            "chooses"
        )
    if run.lora:
        return _adapters_script(run)
    if uses_deepspeed(run):
        deepspeed_settings(run)  # raises SpecError for a run that it does not support
        return "trainer"
    if run.zero:
        _check_shards(run)
    plain = run.zero or run.precision.startswith("mixed") or run.optimizer == "muon"
    return "pytorch" if plain else "trainer"


def uses_deepspeed(run: Training) -> bool:
    """Whether the script passes ds_config.json to the Trainer: for stack="deepspeed", ZeRO-1, offload="optimizer", and
    sharded adapters with fp32 copies. FSDP2, which offloads weights together with states, shards all other runs.
    """
    copied = run.lora is not None and run.precision.startswith("mixed")
    return bool(stack_of(run).own_zero or run.zero == 1 or (run.zero and copied) or run.offload == "optimizer")


def deepspeed_settings(run: Training) -> dict[str, Any]:
    """Return ds_config.json. It does not contain compile, because the script compiles the model itself.

    With stack="deepspeed", DeepSpeed's own optimizer is used, and the Trainer replaces "auto" by its own arguments.
    """
    settings = replace(run, compile=False).to_deepspeed()
    if run.zero == 3:  # else the trained model is saved in shards
        settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if stack_of(run).own_zero:
        torchs = {"torch_adam": True} if DeepSpeed.of(run).torch_adam else {}
        kind = {"adamw": "AdamW", "lion": "Lion"}[run.optimizer]
        settings["optimizer"] = {"type": kind, "params": {"lr": "auto", "weight_decay": "auto", **torchs}}
    return settings


def _adapters_script(run: Training) -> str:
    """Return the script that trains adapters. FSDP2 shards frozen 16-bit weights, and DeepSpeed trains adapters with
    fp32 copies. Raises SpecError if none of the scripts can."""
    if run.quantization == "gptq":
        raise SpecError("quantization='gptq' runs AutoGPTQ's layer, and current transformers loads such a file with "
                        "GPT-QModel's; give 'nf4' or 'int8'")  # fmt: skip
    if run.quantization and run.zero:
        raise SpecError(
            f"quantization={run.quantization!r} with zero={run.zero}: quantized weights cannot be sharded; give "
            "zero=0"
        )
    if run.half_layers == "embeddings":
        raise SpecError("half_layers='embeddings': the scripts that llmlab writes cast to fp32 every layer that is not "
                        "quantized, as peft does, or none; leave it out, or give 'all'")  # fmt: skip
    if uses_deepspeed(run):
        deepspeed_settings(run)
    elif run.zero:
        _check_shards(run)
        return "pytorch"
    elif run.precision.startswith("mixed"):
        raise SpecError(f"precision={run.precision!r} with lora: adapters have no half-precision copy; give bf16")
    return "sft"


def _check_shards(run: Training) -> None:
    if run.optimizer not in ("sgd", "adamw", "adamw-fused"):
        raise SpecError(
            f"optimizer={run.optimizer!r} with zero={run.zero}: it does not support sharded states; give adamw or "
            "sgd"
        )


def packages(run: Training) -> list[str]:
    """Return the packages that the script of `run` needs."""
    chosen = kind(run)
    needs = [*NEEDS[chosen], *(["deepspeed"] if uses_deepspeed(run) else [])]
    needs += ["bitsandbytes"] if run.quantization or run.optimizer in ("adamw-8bit", "lion") else []
    needs += ["peft"] if run.lora and chosen == "pytorch" else []
    return [*needs, *(["liger-kernel"] if run.kernels == "liger" else [])]


def training_script(spec: ModelSpec, run: Training, model: str, from_scratch: bool, title: str) -> str:
    """Return the text of train.py for `run`; `model` is the model that it loads, a name on the hub or a folder."""
    chosen = kind(run)
    folder = files(__package__)
    needs = packages(run)
    words = (
        f'"""{title}, with {WHAT[chosen]}.\n\n    ./launch.sh --data train.txt        with LR=... set\n\n'
        f"It needs {', '.join(needs)}.\n"
        "What a plan does not say stays with you: the learning rate and its schedule, clipping, the data and how\n"
        'long to train.\n"""\n'
    )
    constants = "\n".join(f"{name} = {pformat(value, width=110, sort_dicts=False)}" for name, value in
                      _constants(spec, run, chosen, model, from_scratch).items())  # fmt: skip
    bodies = [folder.joinpath(f"train_{part}.txt").read_text(encoding="utf-8") for part in ("common", chosen)]
    head = IMPORTS.get(chosen, IMPORTS["trainer"])
    return (
        f"{words}\n{head}from functools import partial\nfrom pathlib import Path\n\nimport torch\n\n{constants}\n\n\n"
        + "\n\n".join(bodies)
    )


def _constants(spec: ModelSpec, run: Training, chosen: str, model: str, from_scratch: bool) -> dict[str, Any]:
    """Return the script's constants by name."""
    sharded = bool(run.zero) and chosen == "pytorch"
    in_fp32 = run.precision.startswith("autocast") and not run.half_layers
    weights = "fp32" if in_fp32 or sharded else run.compute_dtype
    if sharded and run.precision in ("fp16", "bf16"):
        weights = run.compute_dtype
    if uses_deepspeed(run) and not run.lora:
        weights = "fp32"  # DeepSpeed creates the 16-bit copies
    values: dict[str, Any] = {
        "MODEL": model, "FROM_SCRATCH": from_scratch, "DTYPE": DTYPES[weights], "ATTENTION": _attention(run),
        "SEQ_LEN": run.seq_len, "MICRO_BATCH": run.micro_batch, "ACCUMULATION": run.accumulation, "DP": run.dp,
        "CHECKPOINTING": run.checkpointing, "KEPT": (),
    }  # fmt: skip
    if run.checkpointing == "selective":
        from ...course.techniques.checkpointing import KEPT_OPERATORS

        values["KEPT"] = KEPT_OPERATORS
    if chosen == "pytorch":
        script_values: Mapping[str, Any] = {
            "PRECISION": run.precision, "COMPUTE": DTYPES[run.compute_dtype], "OPTIMIZER": run.optimizer,
            "ZERO": run.zero, "OFFLOAD": bool(run.offload), "DP_REPLICATE": run.dp_replicate,
            "SYNC_EACH_BATCH": run.sync_each_batch, "REDUCE": DTYPES[run.reduce_dtype], "KERNELS": run.kernels,
            "COMPILE": run.compile, "LORA": None,
        }  # fmt: skip
    else:
        script_values = {"DEEPSPEED": uses_deepspeed(run), "TRAINER": trainer_arguments(run)}
    if run.lora:
        quantization = {"QUANTIZATION": run.quantization, "DOUBLE_QUANT": run.double_quant,
                        "PREPARE": bool(run.quantization) and not run.half_layers} if chosen == "sft" else {}
        script_values = {**script_values, "COMPUTE": DTYPES[run.compute_dtype], **quantization, "LORA": {
            "r": run.lora.rank, "lora_alpha": run.lora.alpha if run.lora.alpha is not None else 2 * run.lora.rank,
            "lora_dropout": run.lora.dropout, "target_modules": list(run.lora.targets),
            "fan_in_fan_out": spec.family == "gpt2",
        }}  # fmt: skip
    return {**values, **script_values}


def _attention(run: Training) -> str:
    return {"flash": "flash_attention_2"}.get(run.attention, run.attention)
