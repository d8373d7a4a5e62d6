"""The command line of a script, also behind a launcher: which file runs, with which arguments, as how many ranks.

Launchers are read by their own parsers, so that any option of theirs is understood and what they would put into the
environment is there.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from unittest import mock

from ..base.compat import check
from ..base.errors import NotAvailable, SpecError

LAUNCHERS = ("torchrun", "accelerate", "deepspeed")


@dataclass(frozen=True)
class Command:
    """A script, or with `module` a module's name, and its arguments.

    `nodes` and `gpus_per_node` are what its launcher said, None where it left that to the machine; `environment` is
    what it would set for the script.
    """

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    nodes: int | None = None
    gpus_per_node: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([*(["-m"] if self.module else []), self.target, *self.arguments])


def command(words: Sequence[str]) -> Command:
    """Return what `words` would start: `train.py ARGS`, `-m MODULE ARGS`, `python ...`, or a launcher's command line.

    Raises SpecError for words that start no Python script, and NotAvailable where the launcher is not installed.
    """
    words = list(words)
    if not words:
        raise SpecError("no script was given; give one with its arguments, for example: llmlab run --gpu T4 train.py "
                        "--epochs 1")  # fmt: skip
    name = Path(words[0]).name
    if re.fullmatch(r"python(\d+(\.\d+)?)?", name):
        if words[1:3] == ["-m", "torch.distributed.run"] or words[1:3] == ["-m", "torch.distributed.launch"]:
            return _torchrun(words[3:])
        words = [word for position, word in enumerate(words[1:]) if word not in ("-u", "-O", "-B") or position]
        return command(words)
    if name == "torchrun":
        return _torchrun(words[1:])
    if name == "accelerate":
        if words[1:2] != ["launch"]:
            raise SpecError(f"accelerate {' '.join(words[1:2])} starts no script; give `accelerate launch SCRIPT`")
        return _accelerate(words[2:])
    if name == "deepspeed":
        return _deepspeed(words[1:])
    if words[0] == "-m":
        if len(words) < 2:
            raise SpecError("-m needs the name of a module, for example: llmlab run --gpu T4 -m package.train")
        return Command(words[1], tuple(words[2:]), module=True)
    return _script(words[0], words[1:])


def _script(target: str, arguments: Sequence[str], **launched: object) -> Command:
    if os.path.isdir(target) and not os.path.isfile(os.path.join(target, "__main__.py")):
        raise SpecError(f"{target} is a folder without __main__.py; give the path of the script")
    if not os.path.exists(target):
        known = ", ".join(LAUNCHERS)
        raise SpecError(f"{target} does not exist; give a Python script, -m MODULE, or a command line of {known}")
    return Command(target, tuple(arguments), **launched)  # type: ignore[arg-type]


def _parsed(launcher: str, parse: Callable[[Sequence[str]], Namespace], words: Sequence[str]) -> Namespace:
    """Return what the launcher's own parser reads; its usage message becomes an error."""
    said = StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            return parse(words)
    except SystemExit:
        last = said.getvalue().strip().splitlines()[-1:] or ["it starts no script"]
        raise SpecError(f"{launcher} {' '.join(words)}: {last[0].split('error: ')[-1]}") from None


def _alone() -> dict[str, str]:
    """Return what a launcher sets for one rank, as for many: a simulator of many sets it by itself."""
    from ..simulation.distributed.process_group import launched

    return launched(1)


def _torchrun(words: Sequence[str]) -> Command:
    from torch.distributed.run import get_args_parser

    args = _parsed("torchrun", get_args_parser().parse_args, words)
    per_node = int(args.nproc_per_node) if args.nproc_per_node.isdigit() else None  # "gpu", "auto"
    nodes = int(args.nnodes.split(":")[-1])
    return _launched(args, args.module, nodes, per_node, _alone() if nodes == per_node == 1 else {})


def _accelerate(words: Sequence[str]) -> Command:
    _need("accelerate")
    check("accelerate.commands.launch")
    launch, environments = import_module("accelerate.commands.launch"), import_module("accelerate.utils.launch")

    def parse(words: Sequence[str]) -> Namespace:
        args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
        return args

    args = _parsed("accelerate launch", parse, words)
    total, nodes = args.num_processes or 1, args.num_machines or 1
    before = dict(os.environ)
    if total > 1:
        environment = environments.prepare_multi_gpu_env(args)
    else:
        _, environment = environments.prepare_simple_launcher_cmd_env(args)
    changed = {name: value for name, value in environment.items() if before.get(name) != value}
    if total == 1:  # it starts no ranks
        return _launched(args, args.module, None, None, changed)
    return _launched(args, args.module, nodes, max(1, total // nodes), changed)


def _deepspeed(words: Sequence[str]) -> Command:
    _need("deepspeed")
    with mock.patch.dict(os.environ, {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}):  # it warns of none
        check("deepspeed.launcher.runner")
    args = _parsed("deepspeed", import_module("deepspeed.launcher.runner").parse_args, words)
    said = [] if args.no_local_rank else ["--local_rank=0"]  # deepspeed/launcher/launch.py
    args.training_script, args.training_script_args = args.user_script, [*said, *args.user_args]
    per_node = args.num_gpus if args.num_gpus > 0 else None
    nodes = args.num_nodes if args.num_nodes > 0 else None
    return _launched(args, args.module, nodes, per_node, _alone() if per_node == 1 and nodes in (None, 1) else {})


def _need(library: str) -> None:
    if find_spec(library) is None:
        raise NotAvailable(f"{library} is not installed; pip install {library}, or give the script without its "
                           "launcher")  # fmt: skip


def _launched(
    args: Namespace, module: bool, nodes: int | None, per_node: int | None, environment: Mapping[str, str]
) -> Command:
    if module:
        target, arguments = args.training_script, tuple(args.training_script_args)
        return Command(target, arguments, True, nodes, per_node, environment)
    return _script(
        args.training_script, args.training_script_args, nodes=nodes, gpus_per_node=per_node, environment=environment
    )
