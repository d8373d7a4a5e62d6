"""Launches by a script: a command that it starts, or one of the ranks that a library starts, runs in this process.

`tune run`, `swift sft`, `axolotl train`, `llamafactory-cli train` and `trl sft` start Python or a launcher; Lightning's
Trainer and Fabric, and Ray's TorchTrainer, start their ranks themselves.
"""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed.launcher.api
import torch.distributed.run

from ..base.errors import NotAvailable
from ..base.notes import Note
from ..hardware.links import GPUS_PER_NODE
from ..simulation.patching.imports import on_import
from .command import LAUNCHERS, LAUNCHING_MODULES, Command, accelerate, command, torchrun
from .watch import Watch

LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
FABRIC = ("lightning.fabric.fabric", "lightning_fabric.fabric")
ACCELERATE = "accelerate.commands.launch"
INSTALLERS = ("ensurepip", "pip", "uv", "venv")
EXECS = ("execv", "execve", "execvp", "execvpe")


class Launches:
    """The launches of one run of `script`: `execute` runs a launched command, and `notes` are sentences for the
    report."""

    def __init__(self, watch: Watch, script: Command, execute: Callable[[Command], None]) -> None:
        self.watch, self.script, self.execute = watch, script, execute
        self.notes: list[Note] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow launches until the block ends."""
        with ExitStack() as stack:
            patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
            stack.enter_context(mock.patch.dict(os.environ))
            patch(subprocess.Popen, "__init__", self._process(subprocess.Popen.__init__))
            for name in EXECS:
                patch(os, name, self._exec(getattr(os, name)))
            patch(torch.distributed.run, "run", lambda args: self._go_on(torchrun(args), None))
            patch(torch.distributed.launcher.api, "launch_agent", self._agent)
            blocked: dict[str, Any] = vars(sys)["modules"]
            stack.callback(blocked.pop, "unsloth", None)
            blocked["unsloth"] = None  # importing it raises ImportError: see missing.py

            def ranks_of(module: str, name: str) -> Callable[[], None]:
                def wrap() -> None:
                    owner = getattr(sys.modules[module], name)
                    patch(owner, "__init__", self._devices(owner.__init__))

                return wrap

            def ray() -> None:
                trainer = sys.modules["ray.train.torch"].TorchTrainer
                patch(trainer, "__init__", self._workers(trainer.__init__))

            def launch() -> None:  # trl calls it with its own options
                module = sys.modules[ACCELERATE]

                @wraps(module.launch_command)
                def launch_command(args: Namespace) -> None:
                    self._go_on(accelerate(args, f"accelerate launch {args.training_script}"), None)

                patch(module, "launch_command", launch_command)

            hooks: dict[str, Callable[[], Any]] = {module: ranks_of(module, "Trainer") for module in LIGHTNING}
            hooks |= {module: ranks_of(module, "Fabric") for module in FABRIC}
            stack.enter_context(on_import({**hooks, "ray.train.torch": ray, ACCELERATE: launch}))
            yield

    def _process(self, real: Callable[..., None]) -> Callable[..., None]:
        @wraps(real)
        def init(process: Any, args: Any, *rest: Any, **options: Any) -> None:
            words, *rest_of_line = _commands(args) if isinstance(args, str) else [[os.fsdecode(arg) for arg in args]]
            if behind := next(filter(self._trains, rest_of_line), None):
                raise NotAvailable(f"the script starts `{shlex.join(behind)}` by a shell, after other commands; let it "
                                   "start that alone")  # fmt: skip
            if words and self._trains(words):
                self._go_on(command(words), options.get("env"))
            real(process, args, *rest, **options)

        return init

    def _exec(self, real: Callable[..., None]) -> Callable[..., None]:
        @wraps(real)
        def exec_(file: Any, args: Sequence[Any], *environment: Mapping[str, str]) -> None:
            words = [os.fsdecode(arg) for arg in args]
            if self._trains(words):
                self._go_on(command(words), environment[0] if environment else None)
            real(file, args, *environment)

        return exec_

    def _trains(self, words: list[str]) -> bool:
        """Return whether `words` start a launcher, or Python code on behalf of a library's command."""
        name, *arguments = words
        if Path(name).name in LAUNCHERS:
            return True
        if not Path(name).name.startswith("python") or not arguments:
            return False
        first, second = (*[argument for argument in arguments if argument != "-u"], "", "")[:2]
        if first == "-m":
            return second in LAUNCHING_MODULES or (self.script.tool and second.partition(".")[0] not in INSTALLERS)
        # Scripts in torch's folder are Inductor's workers.
        return self.script.tool and first.endswith(".py") and not first.startswith(os.path.dirname(torch.__file__))

    def _go_on(self, started: Command, environment: Mapping[str, str] | None) -> None:
        """Run the launched command as this rank, and then end the script, which would only wait for the command."""
        if environment is not None:
            os.environ.update(environment)
        os.environ.update(started.environment)
        if started.nodes is not None or started.gpus_per_node is not None:
            per_node = started.gpus_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", GPUS_PER_NODE))
            self._become((started.nodes or 1) * per_node, per_node)
        self.notes += started.notes
        self.execute(started)
        raise SystemExit(0)

    def _agent(
        self, config: Any, entrypoint: Callable[..., Any] | str | None, args: Sequence[Any], **_: Any
    ) -> dict[int, Any]:
        """Run what torch's elastic_launch starts, as accelerate's notebook_launcher does: a function, or a command."""
        if callable(entrypoint):
            self._become(config.max_nodes * config.nproc_per_node, config.nproc_per_node)
            return {0: entrypoint(*args)}
        started = command([os.fsdecode(word) for word in (entrypoint, *args) if word is not None])
        self._go_on(replace(started, nodes=config.max_nodes, gpus_per_node=config.nproc_per_node), None)
        return {}

    def _become(self, ranks: int, per_node: int) -> None:
        if ranks == 1 and self.watch.where.world_size is None:
            return
        if self.watch.where.world_size not in (None, ranks):
            conflict = f"--world-size gave {self.watch.where.world_size} ranks, and the script starts {ranks}"
            raise NotAvailable(f"{conflict}; leave --world-size out, or change the script")
        self.watch.sim.launch(ranks, per_node, self.watch.where.rank)
        self.watch.where = replace(self.watch.where, world_size=ranks)

    def _devices(self, real: Callable[..., None]) -> Callable[..., None]:
        """Return the constructor of Lightning's Trainer or Fabric that simulates a rank for each of its `devices`."""

        @wraps(real)
        def init(owner: Any, *args: Any, **options: Any) -> None:
            arguments = inspect.signature(real).bind(owner, *args, **options).arguments
            if arguments.get("accelerator", "auto") != "cpu" and "WORLD_SIZE" not in os.environ:
                per_node = _number(arguments.get("devices", "auto"))
                self._become(per_node * int(arguments.get("num_nodes") or 1), per_node)
            real(owner, *args, **options)

        return init

    def _workers(self, real: Callable[..., None]) -> Callable[..., None]:
        """Return the constructor of Ray's TorchTrainer that runs its loop here, as in Ray's own local mode, which reads
        the ranks from the environment."""

        @wraps(real)
        def init(owner: Any, *args: Any, scaling_config: Any = None, **options: Any) -> None:
            workers = getattr(scaling_config, "num_workers", None) or 1
            if workers > 1 and options.get("datasets"):
                raise NotAvailable(f"ray's TorchTrainer with datasets= and {workers} workers: Ray Data's shards need a "
                                   "cluster; load the rows in the training function")  # fmt: skip
            self._become(workers, GPUS_PER_NODE)
            if scaling_config is not None:
                scaling_config.num_workers = 0
            real(owner, *args, scaling_config=scaling_config, **options)

        return init


def _number(devices: Any) -> int:
    """Return the number of devices in Lightning's `devices`: a number or a list of indices; 1 for "auto" or -1."""
    if isinstance(devices, str):
        devices = devices.strip().strip("[]")
        devices = [index for index in devices.split(",") if index] if "," in devices else devices
    if isinstance(devices, (list, tuple)):
        return len(devices)
    number = int(devices) if str(devices).lstrip("-").isdigit() else 1
    return max(1, number)


def _commands(line: str) -> list[list[str]]:
    """Return the words of each command in a line for a shell; one without words if its quotes are not understood."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if word in ("&&", "||") or not word.strip(";\n"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:
        return [[]]
    return [words for words in commands if words] or [[]]
