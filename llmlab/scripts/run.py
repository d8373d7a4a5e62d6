"""Runs a script on a simulated GPU: `llmlab run`.

The script runs unchanged, in this process, as one of its ranks. It ends after a given number of optimizer steps,
whatever its loop, and the files that it writes go to a separate folder.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from ..base.errors import NotAvailable, ScriptFailed
from ..base.notes import Note
from .command import Command
from .data import data_by_name
from .hub import models_by_name
from .launches import Launches
from .missing import chain, refused, script_line
from .nvidia_smi import nvidia_smi
from .processes import Processes
from .report import ScriptReport
from .watch import INTERRUPTED, RAN_OUT_OF_MEMORY, Conditions, Enough, Watch, is_out_of_memory, watched
from .written_files import WrittenFiles

OURS = (str(Path(__file__).parents[1]), "<frozen runpy>")


def run_script(
    script: Command,
    where: Conditions,
    folder: str,
    configs: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    data: Mapping[str, str] = MappingProxyType({}),
    on_step: Callable[[Watch], None] = lambda watch: None,
    on_end: Callable[[Watch], None] = lambda watch: None,
) -> ScriptReport:
    """Return the report on the memory and time of `script`; the files that it writes go to `folder`.

    `configs` are the configs of models that it loads by name, `data` the files of data sets. `on_step` is called after
    each optimizer step, `on_end` before the simulator closes. Raises NotAvailable if the script does something that is
    not simulated, or needs something that is missing, and ScriptFailed if it fails by itself.
    """
    with mock.patch.dict(os.environ, script.environment), watched(where, on_step) as watch:
        if where.world_size is not None and script.gpus_per_node is not None:
            watch.sim.launch(where.world_size, script.gpus_per_node, where.rank)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        processes, launches = Processes(watch.sim), Launches(watch, script, _execute)
        try:
            with (
                models_by_name(configs), data_by_name(data), nvidia_smi(where.gpu),
                WrittenFiles(folder).patched(), processes.followed(), watch.sim.kept_files(), launches.followed(),
            ):  # fmt: skip
                _execute(script)
        except Enough:
            pass
        except KeyboardInterrupt:
            watch.ended = INTERRUPTED
        except (Exception, SystemExit) as error:
            # Errors after the last step are ignored: a script may have turned its end into an error.
            if not watch.is_done and not (isinstance(error, SystemExit) and error.code in (None, 0)):
                if not is_out_of_memory(error) and not (isinstance(error, SystemExit) and watch.sim.out_of_memory):
                    raise _verdict(script, error, watch.refused) from None
                watch.ended = RAN_OUT_OF_MEMORY  # even if the script, or its runner, caught the error
        watch.elsewhere = processes.peaks
        on_end(watch)
        report = watch.report(str(script))
        return replace(report, notes=(*script.notes, *launches.notes, *_hidden(watch, visible), *report.notes))


def _hidden(watch: Watch, visible: str) -> tuple[Note, ...]:
    """Return a note if the script, started without a launcher, would see more GPUs than the simulated one."""
    if "," not in visible or watch.where.world_size is not None or watch.sim.ranks > 1:
        return ()
    return (Note("one-gpu-simulated", f"CUDA_VISIBLE_DEVICES={visible} names several GPUs, of which one is simulated. "
                 "Start one rank per GPU (torchrun, or --world-size) to simulate one of them."),)  # fmt: skip


def _execute(script: Command) -> None:
    """Run the script as Python would."""
    first = os.getcwd() if script.module else os.path.dirname(os.path.abspath(script.target))
    # Set by accelerate's launcher for DeepSpeed.
    extra_paths = script.environment.get("PYTHONPATH", "").split(os.pathsep)
    with (
        mock.patch.object(sys, "argv", [script.target, *script.arguments]),
        mock.patch.object(sys, "path", [first, *filter(None, extra_paths), *sys.path]),
    ):
        if script.module:
            runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script.target, run_name="__main__")


def _verdict(script: Command, error: BaseException, refused: str | None) -> NotAvailable | ScriptFailed:
    """Return the exception to raise for the error that ended the script; `refused` is an error of the simulation that
    the script caught before.

    Libraries such as Hydra show an error and call sys.exit(1), so the error that they caught is used.
    """
    caught = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(caught, Exception) and not isinstance(caught, ArgumentError):  # argparse has printed its message
        if (refusal := _refusal(caught)) is None and refused:
            if refused in str(caught):  # it raised the error again, as a future's result() does
                return NotAvailable(f"{refused}{script_line(caught)}")
            last = f"{type(caught).__name__}: {' '.join(str(caught).split())}"
            went_on = "The script went on after this, and failed with"
            return NotAvailable(f"{refused}. {went_on} {last}{script_line(caught)}")
        return refusal or _failure(caught)
    assert isinstance(error, SystemExit)
    return ScriptFailed(f"{script.target} called sys.exit({error.code!r})")


def _refusal(error: BaseException) -> NotAvailable | None:
    """Return a NotAvailable if the error comes from the simulator, or from a missing resource, else None."""
    from ..simulation.values.placeholders import WAY_ROUND, Unknown

    for cause in chain(error):
        if isinstance(cause, NotAvailable):
            return cause if ", line " in str(cause) else NotAvailable(f"{cause}{script_line(cause)}")
        text = str(cause).replace(f"<class '{Unknown.__module__}.{Unknown.__qualname__}'>", Unknown.__name__)
        of_torch = isinstance(cause, TypeError) and Unknown.__name__ in text  # about a size
        if of_torch or text != str(cause):  # or of a check of its type
            line = traceback.extract_tb(cause.__traceback__)[-1]
            return NotAvailable(f"{text}: {WAY_ROUND} ({os.path.basename(line.filename)}, line {line.lineno})")
    return refused(error)


def _failure(error: BaseException) -> ScriptFailed:
    """Return the script's own traceback, without the frames of llmlab and runpy."""
    formatted = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in formatted.stack if not frame.filename.startswith(OURS)]
    formatted.stack = traceback.StackSummary.from_list(frames)
    return ScriptFailed("".join(formatted.format()).rstrip())
