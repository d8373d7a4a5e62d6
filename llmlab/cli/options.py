"""The options of the command line, most made from the fields of Training, LoRA and Inference; the run they ask for."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from ..base.errors import SpecError
from ..engines.readers import read_mapping
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import Cluster, cluster
from ..hardware.this_machine import host
from ..specs.help import HELP
from ..specs.run import Inference, LoRA, Run, Training

# The names of the fields that only a generation has.
GENERATION = tuple(f.name for f in fields(Inference) if f.name not in {f.name for f in fields(Training)})
# The help's words for defaults that depend on the device or on other options.
USUAL = {
    "precision": "bf16 if --lora is given without --quantization, otherwise autocast-bf16; on a GPU without bf16, "
    "such as a T4, fp16 or autocast-fp16; on a CPU, fp32. --stack and --from can set other defaults",
    "weights": "bf16, or fp16 on a GPU without bf16, such as a T4",
    "kv": "the dtype of --weights. With int8 or nf4 weights, the default is bf16, or fp16 on a GPU without bf16",
    "reference": "adapter with --lora, kept without --lora, but no reference model with grpo",
    "lora_autocast_adapter_dtype": "on, unless the --stack trains adapters in 16 bits",
}
MODEL = ("MODEL is a name that `llmlab models` lists, the OWNER/NAME of a model in the local Hugging Face cache, or "
         "the path of a config.json file (or of its folder).")  # fmt: skip
EXIT_CODES = ("Exit codes: 0 = the run fits; 1 = the run does not fit; 2 = llmlab cannot tell, or the input is "
              "invalid.")  # fmt: skip

def spec_options() -> list[click.Option]:
    """Return the options of every field of Training, LoRA and Inference, each once."""
    options: dict[str, click.Option] = {}
    for owner in (Training, LoRA, Inference):
        for field, hint in get_type_hints(owner).items():
            name = field if owner is not LoRA else "lora" if field == "rank" else f"lora_{field}"
            if name in HELP and name not in options and hint != LoRA | None:
                words = HELP[name]
                if owner is Inference:
                    words = f"Generation: {words[0].lower()}{words[1:]}"
                options[name] = _option(name, hint, getattr(owner, field), words)
    implying = ", ".join(map(_flag, GENERATION))
    words = f"Generate text instead of training. Each of these options implies --inference: {implying}."
    options["inference"] = click.Option(["--inference"], is_flag=True, help=words)
    words = "Read the options of a training run from a config file. .json = DeepSpeed or TrainingArguments; "
    words += ".yaml = Accelerate; .toml = torchtitan."
    options["config"] = click.Option(["--from", "config"], metavar="FILE", help=words)
    return list(options.values())


def picture_file(context: click.Context, option: click.Parameter, name: str | None) -> str | None:
    """Return the name of a picture to be written; a click callback. Raises SpecError, before any work is done, for
    another format than those of the help, and for a folder that does not exist."""
    if name is None:
        return None
    if Path(name).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise SpecError(f"{option.opts[0]} {name}: the name of a picture ends in .png, .svg or .pdf")
    if not Path(name).parent.is_dir():
        raise SpecError(f"{option.opts[0]} {name}: there is no folder {Path(name).parent}; make it first")
    return name


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _option(name: str, hint: Any, default: Any, words: str) -> click.Option:
    """Return the option that stands for one field of a spec."""
    flag, optional = _flag(name), NoneType in get_args(hint)
    kind = get_args(hint)[0] if optional else hint
    if name == "lora":
        return click.Option([flag, name], type=int, metavar="RANK", help=words)
    if name == "pixels":
        return click.Option([flag, name], type=_pixels, default=None, metavar="N|HEIGHTxWIDTH", help=words)
    if kind is bool:
        both = f"{flag}/--no-{flag.removeprefix('--')}" if default else flag
        shown = USUAL.get(name, default)
        return click.Option([both, name], is_flag=True, default=default, show_default=shown, help=words)
    if get_origin(kind) is Literal:
        words += f" One of {', '.join((*(['none'] if optional else []), *get_args(kind)))}."
        default = default or "none"
    elif isinstance(default, tuple):
        default = ",".join(default)
    kind = kind if kind in (int, float) else str
    return click.Option(
        [flag, name],
        type=_or_none(kind) if optional else kind,
        default=default,
        show_default=USUAL.get(name, default is not None),
        help=words,
    )


def _or_none(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return None if text in (None, "none") else kind(text)

    convert.__name__ = {int: "integer", float: "float"}.get(kind, "text")
    return convert


def _pixels(text: str) -> int | tuple[int, ...]:
    sides = text.lower().split("x")
    if not all(side.isdecimal() for side in sides) or len(sides) > 2:
        raise ValueError(f"{text!r} is neither a number of pixels, such as 1048576, nor HEIGHTxWIDTH, such as 1024x768")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


_pixels.__name__ = "size"  # in click's message


def run_from(context: click.Context) -> Run:
    """Return the Training or Inference that the options given on this command line ask for.

    Dtypes that nobody gave are those of `USUAL`, which practitioners run; a stack or a file (--from) has its own.
    """
    given = {
        name: context.params[name]
        for name in ("inference", *HELP)
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    generation = [name for name in given if name in GENERATION]
    owner = Inference if given.pop("inference", False) or generation else Training
    known = {f.name for f in fields(owner)}
    of_generation = f"{_flag(generation[0]) if generation else '--inference'} only to generation. Remove one of them."
    if owner is Inference and (stray := [name for name in given if name not in known]):
        raise SpecError(f"{_flag(stray[0])} applies only to training, and {of_generation}")
    if (config := context.params.get("config")) is not None and owner is Inference:
        raise SpecError(f"--from {config} applies only to training, and {of_generation}")
    adapter = {name: given.pop(name) for name in list(given) if name == "lora" or name.startswith("lora_")}
    if adapter:
        if "lora" not in adapter:
            raise SpecError(f"{_flag(next(iter(adapter)))} needs --lora with a rank, for example --lora 16")
        values = {name.removeprefix("lora_"): value for name, value in adapter.items() if name != "lora"}
        if "targets" in values:
            values["targets"] = tuple(name.strip() for name in values["targets"].split(",") if name.strip())
        given["lora"] = LoRA(rank=adapter["lora"], **values)
    if config is not None:
        return _from_config(config, given)
    half = _half(context)
    if owner is Inference:
        half = "bf16" if half == "fp32" else half  # a CPU generates in bf16 too
        weights = given.get("weights", half)
        return Inference(**{"weights": weights, "kv": half if weights in ("int8", "nf4") else weights, **given})
    if given.get("stack", "transformers") == "transformers":
        # Weights that are frozen are loaded in half precision; of a quantized model peft casts the others to fp32.
        cast = half != "fp32" and ("lora" not in given or given.get("quantization"))
        given = {"precision": f"autocast-{half}" if cast else half, **given}
    return Training(**given)


def changed(context: click.Context, options: str, flag: str) -> click.Context:
    """Return the context of the same command line with the `options` that `flag` gave in the place of its own."""
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise SpecError(f"{flag} {options!r} cannot be read: {error}; give options in quotes") from None
    if not words or not words[0].startswith("-"):
        raise SpecError(f"{flag} {options!r} has no option; give, for example, {flag} '--zero 3'")
    other = context.command.make_context(context.info_name, [context.params["model"], *words], parent=context.parent)
    if other.params.get(flag.lstrip("-")) is not None:
        raise SpecError(f"{flag} inside of {flag}; compare two runs at a time")
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is ParameterSource.COMMANDLINE and other.get_parameter_source(name) is not source:
            other.params[name] = value
            other.set_parameter_source(name, source)
    return other


def _half(context: click.Context) -> str:
    """Return the half precision that the command's device computes fast, bf16 where none is named; fp32 on a CPU and on
    a GPU without one."""
    name = context.params.get("gpu")
    if name is None and context.info_name in ("measure", "compare"):  # on this machine
        here, device = host(), context.params.get("device") or ""
        if here.device != "cuda" or device.startswith(("cpu", "mps")):
            return "fp32"
        return "bf16" if here.supports_bf16 else "fp16"
    if isinstance(name, str) and name.lower() == "cpu":
        return "fp32"
    return "bf16" if name is None else next(half for half in ("bf16", "fp16", "fp32") if find_gpu(name).peak(half))


def _from_config(config: str, given: dict[str, Any]) -> Training:
    """Return the run that a file of an engine says, with the fields that the command line gives."""
    ending = Path(config).suffix.lower()
    if ending in (".yaml", ".yml"):
        return Training.from_accelerate(Path(config), **given)
    if ending == ".toml":
        return Training.from_torchtitan(Path(config), **given)
    if ending != ".json":
        raise SpecError(f"--from {config}: the file's ending names no known format; give a .json, .yaml or .toml file")
    settings = read_mapping("DeepSpeed", Path(config), json.loads)
    if "per_device_train_batch_size" in settings:
        return Training.from_trainer(settings, **given)
    return Training.from_deepspeed(settings, **given)


CLUSTER = (
    click.option("--network", metavar="NAME", help="Network between the nodes, such as InfiniBand-NDR, Ethernet-100 or "
                 "EFA-400. If NAME is unknown, the error message lists the known networks."),
    click.option("--link", metavar="NAME", help="Link between the GPUs of a node, such as NVLink-4 or PCIe-4. If "
                 "NAME is unknown, the error message lists the known links."),
    click.option("--link-gb-s", type=float, metavar="RATE",
                 help="Bandwidth within a node in GB/s. nccl-tests prints this bandwidth as busbw."),
    click.option("--network-gb-s", type=float, metavar="RATE",
                 help="Bandwidth between nodes in GB/s. all_reduce_perf of nccl-tests prints this bandwidth as busbw "
                 "when it runs on all GPUs of several nodes."),
    click.option("--gpus-per-node", type=int, metavar="N", help="GPUs per node. Default: the number in the vendor's "
                 "server, usually 8."),
    click.option("--adapters", type=int, metavar="N", help="Network interface cards (NICs) per node. Default: one per "
                 "GPU."),
    click.option("--no-nvls", is_flag=True, default=None,
                 help="Disable NVLink SHARP (NCCL_NVLS_ENABLE=0). All-reduces are then computed on the GPUs, not in "
                 "the NVLink switches."),
)  # fmt: skip


def cluster_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give `command` the options that `cluster_from` reads."""
    for option in reversed(CLUSTER):
        command = option(command)
    return command


def cluster_from(context: click.Context) -> Cluster | None:
    """Return the cluster that the options of this command line describe; None, the GPU's usual nodes, without them."""
    names = ("network", "link", "link_gb_s", "network_gb_s", "gpus_per_node", "adapters", "no_nvls")
    given = {name: value for name in names if (value := context.params[name]) is not None}
    if not given:
        return None
    if (gpu := context.params["gpu"]) is None:
        flag = next(iter(given)).replace("_", "-")
        raise SpecError(f"--{flag} describes the nodes of a GPU, and no --gpu was given; add one")
    rates = {"reached": given.get("link_gb_s"), "reached_across": given.get("network_gb_s")}
    return cluster(
        gpu, given.get("network"), given.get("gpus_per_node"), given.get("adapters"), given.get("link"),
        nvls=not given.get("no_nvls"), **{name: rate and rate * 1e9 for name, rate in rates.items()},
    )  # fmt: skip
