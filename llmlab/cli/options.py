"""The options of the command line, most made from the fields of Training, LoRA and Inference; the run they ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from ..base.errors import SpecError
from ..engines.readers import read_mapping
from ..hardware.links import Cluster, cluster
from ..specs.help import HELP
from ..specs.run import Inference, LoRA, Run, Training


def spec_options() -> list[click.Option]:
    """Return the options of every field of Training, LoRA and Inference, each once."""
    options: dict[str, click.Option] = {}
    for owner in (Training, LoRA, Inference):
        if owner is Inference:
            words = "Ask for a generation, not a training step."
            options["inference"] = click.Option(["--inference"], is_flag=True, help=words)
        for field, hint in get_type_hints(owner).items():
            name = field if owner is not LoRA else "lora" if field == "rank" else f"lora_{field}"
            if name in HELP and name not in options and hint != LoRA | None:
                words = HELP[name]
                if owner is Inference:
                    words = f"With --inference: {words[0].lower()}{words[1:]}"
                options[name] = _option(name, hint, getattr(owner, field), words)
    words = "Read the run from DeepSpeed's .json, Accelerate's .yaml, torchtitan's .toml or TrainingArguments' .json."
    options["config"] = click.Option(["--from", "config"], metavar="FILE", help=words)
    return list(options.values())


def _option(name: str, hint: Any, default: Any, words: str) -> click.Option:
    """Return the option that stands for one field of a spec."""
    flag, optional = "--" + name.replace("_", "-"), NoneType in get_args(hint)
    kind = get_args(hint)[0] if optional else hint
    if name == "lora":
        return click.Option([flag, name], type=int, metavar="RANK", help=words)
    if kind is bool:
        both = f"{flag}/--no-{flag.removeprefix('--')}" if default else flag
        return click.Option([both, name], is_flag=True, default=default, help=words)
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
        show_default=default is not None,
        help=words,
    )


def _or_none(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return None if text in (None, "none") else kind(text)

    convert.__name__ = {int: "integer", float: "float"}.get(kind, "text")
    return convert


def run_from(context: click.Context) -> Run:
    """Return the Training or Inference that the options given on this command line ask for."""
    given = {
        name: context.params[name]
        for name in ("inference", *HELP)
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    owner = Inference if given.pop("inference", False) else Training
    adapter = {name: given.pop(name) for name in list(given) if name == "lora" or name.startswith("lora_")}
    stray = [name for name in given if name not in {f.name for f in fields(owner)}]
    if owner is Inference:
        stray += list(adapter)
    if stray:
        own = ", ".join("--" + f.name.replace("_", "-") for f in fields(Inference))
        which = "is for training; with --inference give" if owner is Inference else "needs --inference; with it give"
        raise SpecError(f"--{stray[0].replace('_', '-')} {which} any of {own}")
    if adapter:
        if "lora" not in adapter:
            raise SpecError(
                f"--{next(iter(adapter)).replace('_', '-')} without --lora; give the rank, for example --lora 16"
            )
        values = {name.removeprefix("lora_"): value for name, value in adapter.items() if name != "lora"}
        if "targets" in values:
            values["targets"] = tuple(name.strip() for name in values["targets"].split(",") if name.strip())
        given["lora"] = LoRA(rank=adapter["lora"], **values)
    if (config := context.params.get("config")) is None:
        return owner(**given)
    if owner is Inference:
        raise SpecError(f"--from {config} says a training; drop --inference")
    return _from_config(config, given)


def _from_config(config: str, given: dict[str, Any]) -> Training:
    """Return the run that a file of an engine says, with the fields that the command line gives."""
    ending = Path(config).suffix.lower()
    if ending in (".yaml", ".yml"):
        return Training.from_accelerate(Path(config), **given)
    if ending == ".toml":
        return Training.from_torchtitan(Path(config), **given)
    if ending != ".json":
        raise SpecError(f"--from {config}: give a .json, .yaml or .toml")
    settings = read_mapping("DeepSpeed", Path(config), json.loads)
    if "per_device_train_batch_size" in settings:
        return Training.from_trainer(settings, **given)
    return Training.from_deepspeed(settings, **given)


CLUSTER = (
    click.option("--network", metavar="NAME", help="What connects nodes, such as InfiniBand-NDR."),
    click.option("--link", metavar="NAME", help="What connects the GPUs of a node, such as NVLink-4."),
    click.option("--link-gb-s", type=float, metavar="RATE", help="busbw that nccl-tests measure in a node, in GB/s."),
    click.option("--gpus-per-node", type=int, metavar="N", help="GPUs in each node; without it the maker's, mostly 8."),
    click.option("--adapters", type=int, metavar="N", help="Network adapters in each node; without it one per GPU."),
    click.option("--no-nvls", is_flag=True, default=None, help="Let GPUs add in an all-reduce, not the switches."),
)


def cluster_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give `command` the options that `cluster_from` reads."""
    for option in reversed(CLUSTER):
        command = option(command)
    return command


def cluster_from(context: click.Context) -> Cluster | None:
    """Return the cluster that the options of this command line describe; None, the card's usual nodes, without them."""
    names = ("network", "link", "link_gb_s", "gpus_per_node", "adapters", "no_nvls")
    given = {name: value for name in names if (value := context.params[name]) is not None}
    if not given:
        return None
    if (card := context.params["gpu"]) is None:
        flag = next(iter(given)).replace("_", "-")
        raise SpecError(f"--{flag} without --gpu; name the card whose nodes it describes")
    reached = given.get("link_gb_s")
    return cluster(
        card, given.get("network"), given.get("gpus_per_node"), given.get("adapters"), given.get("link"),
        nvls=not given.get("no_nvls"), reached=None if reached is None else reached * 1e9,
    )  # fmt: skip
