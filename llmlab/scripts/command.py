"""The command line of a script, also behind a launcher: the file that runs, its arguments, and the number of ranks.

A launcher's command line is read by the launcher's own parser, so that all its options are understood and the script
gets the environment variables that the launcher would set.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from ..base.compat import check
from ..base.errors import NotAvailable, SpecError
from ..base.notes import Note
from ..engines.readers import read_mapping, read_yaml
from ..hardware.links import GPUS_PER_NODE
from .missing import UNSLOTH

LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
# The modules by which `python -m` starts them.
LAUNCHING_MODULES = {
    "torch.distributed.run": ("torchrun",), "torch.distributed.launch": ("torch.distributed.launch",),
    "accelerate.commands.launch": ("accelerate", "launch"), "accelerate.commands.accelerate_cli": ("accelerate",),
    "deepspeed.launcher.runner": ("deepspeed",),
}  # fmt: skip
# Commands that train, and the packages that install them. An installed command runs like any script.
COMMANDS = {
    "axolotl": "axolotl", "fabric": "lightning", "litgpt": "litgpt", "llamafactory-cli": "llamafactory",
    "lmf": "llamafactory", "swift": "swift", "trl": "trl", "tune": "torchtune",
}  # fmt: skip
# Commands that start scripts in another process or on another machine, and that may be Python code themselves.
ELSEWHERE = (
    "colossalai", "horovodrun", "ipython", "jupyter", "kubectl", "modal", "mpiexec", "mpirun", "msrun", "papermill",
    "ray", "sbatch", "sky", "srun", "torchx",
)  # fmt: skip
GPUS_ASSUMED, RANK_0 = "gpus-assumed", "rank-0-simulated"
NO_AFFINITY = Note("no-cpu-affinity", "--enable_cpu_affinity was not carried out: it does not change the GPU's memory.")


@dataclass(frozen=True)
class Command:
    """A script, or with `module` a module's name, and its arguments.

    `tool`: the script is a library's command, such as `tune`. `nodes` and `gpus_per_node` are from the launcher's
    options, None if the launcher would use the machine's. `environment` are the variables that it would set for the
    script; `notes` are sentences for the report.
    """

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    nodes: int | None = None
    gpus_per_node: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    tool: bool = False

    def __str__(self) -> str:
        target = Path(self.target).name if self.tool else self.target
        return " ".join([*(["-m"] if self.module else []), target, *self.arguments])


def command(words: Sequence[str]) -> Command:
    """Return the script that `words` would start: `train.py ARGS`, `-m MODULE ARGS`, `python ...`, a launcher's command
    line, or the command of an installed library, such as `tune run`. Assignments `NAME=value` may come first, as in a
    shell.

    Raises SpecError for words that start no Python script, and NotAvailable if the launcher is not installed.
    """
    words = list(words)
    if not words:
        raise SpecError("no script was given; give one with its arguments, for example: llmlab run --gpu T4 train.py "
                        "--epochs 1")  # fmt: skip
    name = Path(words[0]).name
    if assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0]):
        with mock.patch.dict(os.environ, {assigned[1]: assigned[2]}):
            after = command(words[1:])
        return replace(after, environment={assigned[1]: assigned[2], **after.environment})
    if re.fullmatch(r"python(\d+(\.\d+)?)?", name):
        words = words[1:]
        while words and (option := re.fullmatch(r"-(?:[bBdEiIOPqsSuvx]+|([WX])(.*))", words[0])):
            words = words[2 if option[1] and not option[2] else 1 :]
        return command(words)
    if name == "torchrun":
        return _torchrun("torch.distributed.run", words[1:])
    if name == "torch.distributed.launch":
        return _torchrun(name, words[1:])
    if name == "accelerate-launch":
        return _accelerate(words[1:])
    if name == "accelerate":
        if words[1:2] != ["launch"]:
            raise SpecError(f"accelerate {' '.join(words[1:2])} starts no script; give `accelerate launch SCRIPT`")
        return _accelerate(words[2:])
    if name == "deepspeed":
        return _deepspeed(words[1:])
    if name in ELSEWHERE and not os.path.isfile(words[0]):
        raise _elsewhere(name, words[1:])
    if words[0] == "-c":
        raise SpecError("python -c starts no script; put the code into a file")
    if words[0] == "-m":
        if len(words) < 2:
            raise SpecError("-m needs the name of a module, for example: llmlab run --gpu T4 -m package.train")
        if words[1] in LAUNCHING_MODULES:
            return command([*LAUNCHING_MODULES[words[1]], *words[2:]])
        if (package := words[1].partition(".")[0]) in COMMANDS.values():
            _need(package)
        return Command(words[1], tuple(words[2:]), module=True)
    return _script(words[0], words[1:])


def _elsewhere(name: str, words: Sequence[str]) -> SpecError:
    """Return the error for a command whose options are not read, with the script or the launcher that it starts."""
    starts = (place for place, word in enumerate(words) if Path(word).name in LAUNCHERS or word.endswith(".py"))
    started = f" ({' '.join(words[start:])})" if (start := next(starts, None)) is not None else ""
    return SpecError(f"{name}: its options are not read, and the processes that it starts are not simulated. Give the "
                     f"script that it starts{started}, and its ranks by --world-size, or --nodes and --gpus-per-node")


def _script(target: str, arguments: Sequence[str], **launched: object) -> Command:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    is_file = os.path.exists(target) and not (target in COMMANDS and os.path.isdir(target))  # as in a library's clone
    program = None if is_file or os.sep in target else shutil.which(target, path=path)
    if not program and os.path.isdir(target) and not os.path.isfile(os.path.join(target, "__main__.py")):
        raise SpecError(f"{target} is a folder without __main__.py; give the path of the script")
    if target == "unsloth":
        raise UNSLOTH
    if not program and target in COMMANDS:
        _need(COMMANDS[target])
    if not os.path.exists(program or target) and (os.sep in target or "." in target):
        commands = ", ".join((*LAUNCHERS, *COMMANDS))
        raise SpecError(f"{target} does not exist; give a Python script, -m MODULE, or a command that starts with one "
                        f"of {commands}")  # fmt: skip
    if not os.path.exists(program or target) or not _is_python(program or target):
        raise SpecError(f"{target} is not Python code; give the script that it starts, with its arguments, and "
                        "--world-size for several ranks")  # fmt: skip
    tool = not os.path.isdir(program or target) and not os.path.splitext(program or target)[1]
    return Command(program or target, tuple(arguments), tool=tool, **launched)  # type: ignore[arg-type]


def _is_python(path: str) -> bool:
    """Return whether a file is Python code, judged by its name or by its first line, as for the commands of
    libraries."""
    if os.path.isdir(path) or os.path.splitext(path)[1] in (".py", ".pyw", ".pyc", ".pyz"):
        return True
    with open(path, "rb") as file:
        first = file.readline()
    return b"python" in first if first.startswith(b"#!") else not os.path.splitext(path)[1] and b"\0" not in first


def _parsed(launcher: str, parse: Callable[[Sequence[str]], Namespace], words: Sequence[str]) -> Namespace:
    """Return the options as read by the launcher's own parser; its usage message becomes a SpecError."""
    output = StringIO()
    try:
        with redirect_stderr(output), redirect_stdout(output):
            return parse(words)
    except SystemExit:
        last = output.getvalue().strip().splitlines()[-1:] or ["it starts no script"]
        raise SpecError(f"{launcher} {' '.join(words)}: {last[0].split('error: ')[-1]}") from None


def _alone() -> dict[str, str]:
    """Return the variables that a launcher sets for a single rank. For several ranks, the simulator sets them."""
    from ..simulation.distributed.process_group import launched

    return launched(1)


def torchrun(args: Namespace) -> Command:
    """Return the script that torchrun starts with these parsed options."""
    if not getattr(args, "use_env", True):  # torch.distributed.launch
        args.training_script_args = ["--local-rank=0", *args.training_script_args]
    per_node = None if args.nproc_per_node in ("auto", "gpu", "cpu", "xpu") else _count("nproc_per_node", args)
    nodes = _count("nnodes", args)
    started = _launched("torchrun", args, nodes, per_node, _alone() if nodes == per_node == 1 else {})
    assumed = () if per_node else _assumed("torchrun", "--nproc_per_node", GPUS_PER_NODE)
    return replace(started, notes=(*assumed, *_other_rank("--node_rank", args.node_rank)))


def _count(option: str, args: Namespace) -> int:
    """Return the number that torchrun's `option` gives; of a range such as 1:4, the most."""
    given = str(getattr(args, option))
    if not (last := given.split(":")[-1]).isdigit() or int(last) == 0:
        raise SpecError(f"torchrun --{option} {given} is no number of at least 1; give one")
    return int(last)


def _torchrun(module: str, words: Sequence[str]) -> Command:
    launcher = _imported(module)
    parse = launcher.get_args_parser().parse_args if module == "torch.distributed.run" else launcher.parse_args
    return torchrun(_parsed("torchrun", parse, words))


def _assumed(launcher: str, option: str, gpus: int) -> tuple[Note, ...]:
    """Return a note that a launcher would start one process per GPU of the machine."""
    starts = f"{launcher} was given no number by {option}, so it starts one process per GPU of the machine"
    return (Note(GPUS_ASSUMED, f"{starts}. llmlab assumes {gpus}; give {option} or --world-size for another number."),)


def _other_rank(option: str, rank: int | str | None) -> tuple[Note, ...]:
    """Return a note if a launcher's options ask for the ranks of a node other than the first."""
    if not str(rank).isdigit() or int(str(rank)) == 0:
        return ()
    simulated = "rank 0, on the first node, is simulated; --rank simulates another"
    return (Note(RANK_0, f"{option} {rank} was not carried out: {simulated}."),)


def _accelerate(words: Sequence[str]) -> Command:
    _need("accelerate")
    launch = _imported("accelerate.commands.launch")
    args = _parsed("accelerate launch", launch.launch_command_parser().parse_args, words)
    return accelerate(args, " ".join(["accelerate launch", *words]))


def accelerate(args: Namespace, line: str) -> Command:
    """Return the script that accelerate would start. Accelerate itself reads its options `args` and files, and chooses
    a launcher."""
    check("accelerate.commands.launch")
    if args.config_file is not None:
        read_mapping("Accelerate", Path(args.config_file), read_yaml)  # accelerate fails obscurely without settings
    launch, environments = import_module("accelerate.commands.launch"), import_module("accelerate.utils.launch")
    has_file = args.config_file is not None or os.path.isfile(launch.default_config_file)
    if args.machine_rank is None and not has_file:
        args.machine_rank = 0
    processes = args.num_processes
    commands: list[Command] = []
    gpus = mock.patch.multiple(  # this machine may have no GPU
        torch.cuda, is_available=lambda: True, device_count=lambda: processes or 1, is_bf16_supported=lambda *_: True
    )
    launchers = mock.patch.multiple(launch, **_accelerate_launchers(line, environments, commands))
    no_port = mock.patch.object(environments, "is_port_in_use", lambda *_: False)  # none is opened
    with gpus, launchers, no_port, redirect_stderr(StringIO()), redirect_stdout(StringIO()):
        try:
            unwrap(launch.launch_command)(args)
        except (NotAvailable, SpecError):
            raise
        except Exception as error:  # of many kinds, for options that contradict each other
            raise SpecError(f"{line}: {error}") from error
    assumed = () if processes or has_file or args.cpu else _assumed("accelerate launch", "--num_processes", 1)
    other_rank = _other_rank("--machine_rank", args.machine_rank)  # also from the file
    return replace(commands[0], notes=(*assumed, *other_rank, *commands[0].notes))


def _accelerate_launchers(line: str, environments: ModuleType, commands: list[Command]) -> dict[str, Any]:
    """Return a function for each of accelerate's launchers. It adds to `commands` the script that the launcher would
    start, with the environment that accelerate prepares, or raises SpecError about the command `line`."""

    def start(args: Namespace, environment: Mapping[str, str], ranks: bool = True) -> None:
        environment = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        nodes = (args.num_machines or 1) if ranks else None
        per_node = max(1, args.num_processes // nodes) if nodes else None
        pinned = environment.pop("ACCELERATE_CPU_AFFINITY", "0") not in ("0", "False")
        started = _launched("accelerate launch", args, nodes, per_node, environment)
        commands.append(replace(started, notes=(NO_AFFINITY,) * pinned))

    def simple(args: Namespace) -> None:
        if args.mpirun_hostfile:
            raise SpecError(f"{line}: mpirun starts processes on CPUs, not on GPUs; leave --mpirun_hostfile out")
        start(args, environments.prepare_simple_launcher_cmd_env(args)[1], ranks=False)

    def multi_gpu(args: Namespace) -> None:
        start(args, environments.prepare_multi_gpu_env(args))

    def deepspeed(args: Namespace) -> None:
        _need("deepspeed")
        words, environment = environments.prepare_deepspeed_cmd_env(args)
        start(args, environment)
        if words:  # DeepSpeed's own launcher, for several nodes, may add an argument
            commands[-1] = replace(commands[-1], arguments=_deepspeed(words[1:]).arguments)

    def elsewhere(*args: object) -> None:
        raise SpecError(f"{line}: TPUs and SageMaker are not simulated; give a configuration for GPUs")

    return {
        "simple_launcher": simple, "multi_gpu_launcher": multi_gpu, "deepspeed_launcher": deepspeed,
        "tpu_launcher": elsewhere, "tpu_pod_launcher": elsewhere, "sagemaker_launcher": elsewhere,
    }  # fmt: skip


def _deepspeed(words: Sequence[str]) -> Command:
    _need("deepspeed")
    with mock.patch.dict(os.environ, {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}):  # else it warns
        runner = _imported("deepspeed.launcher.runner")
        check("deepspeed.launcher.runner")
    args = _parsed("deepspeed", runner.parse_args, words)
    if args.autotuning:
        raise SpecError(f"deepspeed --autotuning {args.autotuning} starts many runs; give the one to simulate")
    rank_argument = [] if args.no_local_rank else ["--local_rank=0"]  # deepspeed/launcher/launch.py
    args.training_script, args.training_script_args = args.user_script, [*rank_argument, *args.user_args]
    per_node = args.num_gpus if args.num_gpus > 0 else None
    nodes = args.num_nodes if args.num_nodes > 0 else None
    if args.include or args.exclude or os.path.isfile(args.hostfile):
        try:
            hosts = runner.fetch_hostfile(args.hostfile) or {"localhost": GPUS_PER_NODE}
            gpus = [len(ids) for ids in runner.parse_inclusion_exclusion(hosts, args.include, args.exclude).values()]
        except ValueError as error:
            raise SpecError(f"deepspeed {' '.join(words)}: {error}") from error
        if len(set(gpus)) != 1:
            raise SpecError(f"deepspeed {' '.join(words)}: {gpus} GPUs on its hosts; give hosts with equally many")
        nodes, per_node = nodes or len(gpus), per_node or gpus[0]
    assumed = () if per_node else _assumed("deepspeed", "--num_gpus", 1)
    nodes, per_node = nodes or 1, per_node or 1
    started = _launched("deepspeed", args, nodes, per_node, _alone() if nodes == per_node == 1 else {})
    return replace(started, notes=(*assumed, *_other_rank("--node_rank", args.node_rank)))


def _imported(launcher: str) -> ModuleType:
    """Return a launcher's module. Raises NotAvailable if its library is installed, but cannot be imported."""
    try:
        return import_module(launcher)
    except ImportError as error:
        raise NotAvailable(f"{launcher} cannot be imported: {error}; repair its installation") from error


def _need(library: str) -> None:
    if find_spec(library) is None and not os.path.exists(library):  # a folder that Python would import
        package = {"swift": "ms-swift", "megatron": "megatron-core"}.get(library, library)
        raise NotAvailable(f"{library} is not installed; pip install {package} beside llmlab, or describe the run to "
                           "`llmlab simulate` (--from reads settings of engines)")  # fmt: skip


def _launched(
    launcher: str, args: Namespace, nodes: int | None, per_node: int | None, environment: Mapping[str, str]
) -> Command:
    if args.no_python:
        raise SpecError(f"{launcher} --no_python starts {args.training_script}; give a Python script without it")
    if args.module:
        target, arguments = args.training_script, tuple(args.training_script_args)
        return Command(target, arguments, True, nodes, per_node, environment)
    return _script(
        args.training_script, args.training_script_args, nodes=nodes, gpus_per_node=per_node, environment=environment
    )
