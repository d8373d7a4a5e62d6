"""`llmlab run`: a training script on a simulated GPU; the exit code says whether it fits."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from json import loads
from typing import TYPE_CHECKING, Any

import click

from ..base.errors import SpecError, need_packages
from ..base.units import GiB, show_bytes
from ..hardware.gpu import assumed_memory
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import GPUS_PER_NODE
from .options import picture_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..scripts.command import Command
    from ..scripts.report import ScriptReport
    from ..scripts.watch import Conditions, Watch

EPILOG = """You can put a launcher before SCRIPT: torchrun, accelerate launch or deepspeed. Instead of SCRIPT, you can
give the command of an installed library, such as `tune run`, `trl sft`, `swift sft`, `llamafactory-cli train` or
`axolotl train`. llmlab reads the options and config files of the launcher or command, but runs only one rank. To set an
environment variable, write NAME=value before SCRIPT or the command.

Exit codes: 0 = the run fits; 1 = the run needs more memory than the GPU or --max-gib provides; 2 = llmlab cannot tell,
the input is invalid, or the script failed. If the script failed, its error is on stderr."""
OPTIONS = (
    click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]..."),
    click.option("--gpu", "name", metavar="NAME", required=True,
                 help="GPU to simulate: a GPU that `llmlab gpus` lists, or a memory size such as 48GB."),
    click.option("-m", "module", is_flag=True, help="Run SCRIPT as a module, like python -m."),
    click.option("--steps", type=int, metavar="N",
                 help="End the script after N optimizer steps. Default: run the script to its end."),
    click.option("--world-size", type=int, metavar="N",
                 help="Number of ranks. Default: --nodes times --gpus-per-node, if one of them is given; otherwise the "
                 "number from the launcher, otherwise 1."),
    click.option("--rank", type=int, default=0, metavar="N",
                 help="Rank to simulate. The first rank is 0. Default: 0."),
    click.option("--nodes", type=int, metavar="N",
                 help="Number of nodes. Default: the number from the launcher, otherwise 1."),
    click.option("--gpus-per-node", type=int, metavar="N",
                 help="GPUs per node. Default: the number from the launcher, otherwise 8."),
    click.option("--max-gib", type=float, metavar="GIB",
                 help="Memory limit of the process in GiB. Default: the memory of the GPU."),
    click.option("--assume", type=float, metavar="X",
                 help="Number that the script receives when it reads an unknown value, such as a loss, from the GPU. "
                 "Values are unknown because most simulated tensors hold no data. Default: 1.0, or 0 for an integer. "
                 "If the script prints such a value directly, it prints ?. After float(), int() or bool(), it prints "
                 "this number."),
    click.option("--config", "configs", multiple=True, metavar="NAME=FILE",
                 help="FILE is the config.json of a model that the script loads by NAME. You can repeat --config."),
    click.option("--data", multiple=True, metavar="NAME=FILE",
                 help="FILE (.jsonl, .csv, .parquet or .txt) contains rows of a dataset that the script loads by NAME. "
                 "You can repeat --data."),
    click.option("--out", metavar="DIR",
                 help="Write the script's files to DIR. Default: a temporary folder, which is deleted at the end."),
    click.option("--snapshot", metavar="FILE", help="Write a memory snapshot to FILE. You can view FILE at "
                 "https://pytorch.org/memory_viz."),
    click.option("--timeline", metavar="FILE", callback=picture_file,
                 help="Plot the memory over time to FILE. The name of FILE must end in .png, .svg or .pdf."),
    click.option("--roomy", is_flag=True, hidden=True),
    click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, and the script's output on stderr."),
)  # fmt: skip


# Steps after the last one, then a script that catches every error is ended with its process.
GRACE = 20


def add_run(cli: click.Group, show: Callable[[Any], None]) -> None:
    """Give `cli` the command; `show` prints its answer."""

    def run(as_json: bool, **given: Any) -> int:
        with _aside() if as_json else nullcontext() as back:

            def say(report: ScriptReport) -> int:
                if back:
                    back()
                report = replace(report, notes=(*assumed_memory(given["name"]), *report.notes))
                show(report.to_json() if as_json else report)
                return {"fits": 0, "out of memory": 1, "unknown": 2}[report.outcome]

            return say(answer(say, **given))

    run.__doc__ = "Run a training script on a simulated GPU.\n\nThe script stays unchanged, and no GPU is needed."
    for option in reversed(OPTIONS):
        run = option(run)
    # What follows the script is the script's.
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    cli.command("run", context_settings=settings, epilog=EPILOG)(run)


@contextmanager
def _aside() -> Iterator[Callable[[], None]]:
    """Send what the script and its processes print to stderr, until what it gives is called."""
    sys.stdout.flush()
    real, stdout = sys.stdout, os.dup(1)
    sys.stdout = sys.stderr
    os.dup2(2, 1)

    def back() -> None:
        sys.stdout = real
        os.dup2(stdout, 1)

    try:
        yield back
    finally:
        sys.stdout.flush()
        back()
        os.close(stdout)
        if real is sys.__stdout__:
            atexit.register(os.dup2, 2, 1)  # the last words of the script's libraries come after the answer


def answer(
    say: Callable[[ScriptReport], int],
    words: tuple[str, ...],
    name: str,
    module: bool,
    steps: int | None,
    world_size: int | None,
    rank: int,
    nodes: int | None,
    gpus_per_node: int | None,
    max_gib: float | None,
    assume: float | None,
    configs: tuple[str, ...],
    data: tuple[str, ...],
    out: str | None,
    snapshot: str | None,
    timeline: str | None,
    roomy: bool,
) -> ScriptReport:
    """Return what the script takes, with what it would have taken where it did not fit.

    A script that catches every error, the end too, gets its answer by `say`, and the process ends there.
    """
    need_packages("running a script", "torch")
    from ..scripts.command import GPUS_ASSUMED, RANK_0, command
    from ..scripts.data import read_data
    from ..scripts.hub import read_configs
    from ..scripts.run import run_script
    from ..scripts.watch import RAN_OUT_OF_MEMORY, Conditions

    script = command(["-m", *words] if module else words)
    limit = None if max_gib is None else round(max_gib * GiB)
    ranks = _ranks(script, world_size, nodes, gpus_per_node)
    if (world_size or nodes or gpus_per_node) is not None:
        script = replace(script, notes=tuple(note for note in script.notes if note.code != GPUS_ASSUMED))
    if world_size is None:
        script = replace(script, gpus_per_node=gpus_per_node or script.gpus_per_node)
    else:
        script = replace(script, gpus_per_node=None)
    if rank:
        script = replace(script, notes=tuple(note for note in script.notes if note.code != RANK_0))
    where = Conditions(find_gpu(name), ranks, steps, limit, assume, roomy, rank)

    def keep(watch: Watch) -> None:
        if snapshot:
            watch.sim.save_snapshot(snapshot)
        if timeline:
            watch.sim.timeline.plot().savefig(timeline)

    with (
        tempfile.TemporaryDirectory(prefix="llmlab-run-") as thrown_away,
        _progress() as progress,
    ):

        def on_step(watch: Watch) -> None:
            progress(watch)
            if steps is not None and watch.steps >= steps + GRACE:
                code = say(watch.report(str(script)))
                sys.stdout.flush()
                shutil.rmtree(thrown_away)
                os._exit(code)

        report = run_script(script, where, out or thrown_away, read_configs(configs), read_data(data), on_step, keep)
    if report.outcome == "out of memory" and report.ended == RAN_OUT_OF_MEMORY:
        asked = {"--world-size": world_size, "--rank": rank, "--nodes": nodes, "--gpus-per-node": gpus_per_node}
        return replace(report, needed=_needed(report, where, asked, words, module, configs, data))
    return report


def _ranks(script: Command, world_size: int | None, nodes: int | None, gpus_per_node: int | None) -> int | None:
    """Return the ranks that the options ask for, else those of the script's launcher; None without one."""
    if world_size is not None and (nodes or gpus_per_node) is not None:
        raise SpecError("--world-size already sets the number of ranks, which --nodes and --gpus-per-node set too; "
                        "remove one or the other")  # fmt: skip
    if world_size is not None:
        return world_size
    nodes, gpus_per_node = nodes or script.nodes, gpus_per_node or script.gpus_per_node
    if nodes is None and gpus_per_node is None:
        return None
    # A launcher that takes all GPUs of a machine names no number of them.
    return (nodes or 1) * (gpus_per_node or GPUS_PER_NODE)


@contextmanager
def _progress() -> Iterator[Callable[[Watch], None]]:
    """Show the steps done on a terminal, under what the script prints."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    if not sys.stderr.isatty():  # not rich's is_terminal: FORCE_COLOR, which Jupyter sets, makes that true for a pipe
        yield lambda watch: None
        return
    shown = Spinner("dots", "running, no optimizer step yet")
    # What the script prints goes through rich, to stderr, only where both are the terminal.
    with Live(shown, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()):

        def on_step(watch: Watch) -> None:
            allocated, reserved = show_bytes(watch.sim.peak_allocated), show_bytes(watch.sim.peak_reserved)
            done = f"{watch.steps} optimizer steps, {watch.passes} backward passes"
            shown.update(text=f"{done}, peak {allocated} allocated, {reserved} reserved")

        yield on_step


def _needed(
    report: ScriptReport,
    where: Conditions,
    ranks: dict[str, int | None],
    words: tuple[str, ...],
    module: bool,
    configs: tuple[str, ...],
    data: tuple[str, ...],
) -> int | None:
    """Run the script again, in a process of its own, on a GPU with room for one more step than it came to."""
    options = ["--gpu", report.gpu, "--steps", str(report.steps + 1)]
    options += [word for option, number in ranks.items() if number is not None for word in (option, str(number))]
    options += ["--assume", str(where.assume)] if where.assume is not None else []
    options += [word for path in configs for word in ("--config", path)]
    options += [word for path in data for word in ("--data", path)]
    line = [sys.executable, "-m", "llmlab", "run", "--json", "--roomy", *options, *(["-m"] if module else [])]
    # The folder that a script stands in may hold a package of a library's name.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [*line, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, check=False
    )
    if done.returncode not in (0, 1):
        return None
    again = loads(done.stdout)  # one that fits now was short of room between its blocks
    return again["needed"] or again["peak_reserved"]
