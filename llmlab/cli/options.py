"""The options of the command line, most made from the fields of Training, LoRA and Inference; the run they ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from ..base.errors import SpecError
from ..hardware.links import GPUS_PER_NODE, Cluster, cluster
from ..specs import run as runs
from ..specs.run import Inference, LoRA, Run, Training

# What --help shows. The dataclasses decide what is allowed; a test holds the two equal.
ALLOWED: dict[str, tuple] = {
    "precision": runs.PRECISIONS, "optimizer": runs.OPTIMIZERS, "checkpointing": runs.CHECKPOINTING,
    "attention": runs.ATTENTIONS, "quantization": runs.QUANTIZATIONS, "zero": (0, 1, 2, 3), "offload": runs.OFFLOADS,
    "kernels": runs.KERNELS, "weights": runs.WEIGHTS, "kv": runs.KV_DTYPES,
}  # fmt: skip
HELP = {
    "micro_batch": "Sequences that go through the model at once on each rank.",
    "seq_len": "Tokens per sequence.",
    "precision": "Dtype of weights and arithmetic.",
    "optimizer": "The optimizer.",
    "checkpointing": "What is recomputed in backward.",
    "attention": "Which attention runs.",
    "accumulation": "Micro-batches in one optimizer step.",
    "quantization": "Dtype of the frozen base weights; needs --lora.",
    "zero": "ZeRO stage over the --dp ranks.",
    "dp": "Data-parallel ranks.",
    "tp": "Tensor-parallel ranks.",
    "pp": "Pipeline stages.",
    "cp": "Context-parallel ranks.",
    "ep": "Expert-parallel ranks, of the --dp ranks.",
    "sequence_parallel": "Divide norms and dropout among the --tp ranks too.",
    "offload": "What is kept in the host's memory instead.",
    "compile": "Run under torch.compile.",
    "kernels": "Fused kernels.",
    "lora": "Train adapters of this rank, freeze the rest.",
    "lora_targets": "Linear layers that get an adapter, separated by commas.",
    "lora_alpha": "Numerator of the adapters' scale alpha / rank; without it 2 * rank.",
    "lora_dropout": "Dropout before the adapters.",
    "batch": "Prompts answered at once.",
    "prompt_len": "Tokens per prompt.",
    "new_tokens": "Tokens generated after each prompt.",
    "weights": "Dtype of the weights.",
    "kv": "Dtype of the KV cache.",
}


def option_of(field: Field, owner: type) -> click.Option:
    """Return the command-line option that stands for one field of a spec."""
    name = option_name(field.name, owner)
    kind, optional = _kind(get_type_hints(owner)[field.name])
    words = HELP[name]
    if name in ALLOWED:
        words += f" One of {', '.join('none' if choice is None else str(choice) for choice in ALLOWED[name])}."
    if owner is Inference and field.name not in {f.name for f in fields(Training)}:
        words = f"With --inference: {words[0].lower()}{words[1:]}"
    if name == "lora":
        return click.Option(["--lora", name], type=int, metavar="RANK", help=words)
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        return click.Option([flag, name], is_flag=True, default=field.default, help=words)
    if isinstance(field.default, tuple):
        return click.Option([flag, name], default=",".join(field.default), show_default=True, help=words)
    default = "none" if field.default is None and name in ALLOWED else field.default
    return click.Option(
        [flag, name],
        type=_or_none(kind) if optional else kind,
        default=default,
        show_default=default is not None,
        help=words,
    )


def option_name(field: str, owner: type) -> str:
    """Return the parameter name of a spec's field: LoRA's own carry its name in front."""
    if owner is LoRA:
        return "lora" if field == "rank" else f"lora_{field}"
    return field


def spec_options() -> list[click.Option]:
    """Return the options of every field of Training, LoRA and Inference, each once."""
    options: dict[str, click.Option] = {}
    for owner in (Training, LoRA, Inference):
        if owner is Inference:
            words = "Ask for a generation, not a training step."
            options["inference"] = click.Option(["--inference"], is_flag=True, help=words)
        for field in fields(owner):
            name = option_name(field.name, owner)
            if name not in options and not (owner is Training and name == "lora"):
                options[name] = option_of(field, owner)
    return list(options.values())


def _kind(hint: Any) -> tuple[type, bool]:
    """Return the type an option has, and whether its field may be None."""
    optional = False
    if get_origin(hint) in (Union, UnionType):
        rest = [arg for arg in get_args(hint) if arg is not type(None)]
        optional, hint = len(rest) < len(get_args(hint)), rest[0]
    if get_origin(hint) is tuple:
        return tuple, optional
    return (hint if hint in (int, float, bool) else str), optional


def _or_none(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return None if text in (None, "none") else kind(text)

    convert.__name__ = {int: "integer", float: "float"}.get(kind, "text")
    return convert


def run_from(context: click.Context) -> Run:
    """Return the Training or Inference that the options given on this command line ask for."""
    given = {
        option.name: context.params[option.name]
        for option in spec_options()
        if context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
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
    return owner(**given)


CLUSTER = (
    click.option("--network", metavar="NAME", help="What connects nodes, such as InfiniBand-NDR."),
    click.option("--link", metavar="NAME", help="What connects the GPUs of a node, such as NVLink-4."),
    click.option("--gpus-per-node", type=int, metavar="N", help="GPUs in each node; 8 without it."),
    click.option("--adapters", type=int, metavar="N", help="Network adapters in each node; without it one per GPU."),
)


def cluster_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give `command` the options that `cluster_from` reads."""
    for option in reversed(CLUSTER):
        command = option(command)
    return command


def cluster_from(context: click.Context) -> Cluster | None:
    """Return the cluster that the options of this command line describe; None, the card's usual nodes, without them."""
    names = ("network", "link", "gpus_per_node", "adapters")
    given = {name: value for name in names if (value := context.params[name]) is not None}
    if not given:
        return None
    if (card := context.params["gpu"]) is None:
        flag = next(iter(given)).replace("_", "-")
        raise SpecError(f"--{flag} without --gpu; name the card whose nodes it describes")
    return cluster(
        card, given.get("network"), given.get("gpus_per_node", GPUS_PER_NODE), given.get("adapters"), given.get("link")
    )
