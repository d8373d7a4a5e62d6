"""`llmlab run`: any training script on a simulated card; the exit code says whether it fits."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from json import loads
from typing import TYPE_CHECKING, Any

import click

from ..base.errors import SpecError
from ..base.units import GiB, show_bytes
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import GPUS_PER_NODE

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..scripts.command import Command
    from ..scripts.report import ScriptReport
    from ..scripts.watch import Watch

EPILOG = """The script may stand behind its launcher: torchrun, accelerate launch and deepspeed are read for
their ranks.

Exit codes: 0 fits, 1 does not fit on the card or in --max-gib, 2 could not say, or the script failed by itself."""
OPTIONS = (
    click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]..."),
    click.option("--gpu", "name", metavar="NAME", required=True, help="The card, as `llmlab gpus` names it."),
    click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module."),
    click.option("--steps", type=int, metavar="N", help="End the script after N optimizer steps."),
    click.option("--world-size", type=int, metavar="N", help="Ranks; this is rank 0 of them."),
    click.option("--nodes", type=int, metavar="N", help="Nodes, with --gpus-per-node."),
    click.option("--gpus-per-node", type=int, metavar="N", help="GPUs in each node; 8 without it."),
    click.option("--max-gib", type=float, metavar="GIB", help="The most that the process may take of the card."),
    click.option("--assume", type=float, metavar="X", help="The value of every number that is read from the card."),
    click.option("--config", "configs", multiple=True, metavar="NAME=FILE",
                 help="The config.json of a model that the script loads by NAME; may be repeated."),
    click.option("--out", metavar="DIR", help="Keep the files that the script writes here; else they are thrown away."),
    click.option("--snapshot", metavar="FILE", help="Write a memory snapshot for https://pytorch.org/memory_viz."),
    click.option("--timeline", metavar="FILE", help="Write a picture of the memory over time: .png, .svg or .pdf."),
    click.option("--roomy", is_flag=True, hidden=True),
    click.option("--json", "as_json", is_flag=True, help="Print JSON; the script's own output goes to stderr."),
)  # fmt: skip


def add_run(cli: click.Group, show: Callable[[Any], None]) -> None:
    """Give `cli` the command; `show` prints its answer."""

    def run(as_json: bool, **given: Any) -> int:
        report = answer(as_json, **given)
        show(report.to_json() if as_json else report)
        return {"fits": 0, "out of memory": 1, "unknown": 2}[report.outcome]

    run.__doc__ = "Run a training SCRIPT, as it stands, on a simulated card, and say what it takes."
    for option in reversed(OPTIONS):
        run = option(run)
    # What follows the script is the script's.
    settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    cli.command("run", context_settings=settings, epilog=EPILOG)(run)


def answer(
    as_json: bool,
    words: tuple[str, ...],
    name: str,
    module: bool,
    steps: int | None,
    world_size: int | None,
    nodes: int | None,
    gpus_per_node: int | None,
    max_gib: float | None,
    assume: float | None,
    configs: tuple[str, ...],
    out: str | None,
    snapshot: str | None,
    timeline: str | None,
    roomy: bool,
) -> ScriptReport:
    """Return what the script takes, with what it would have taken where it did not fit."""
    from ..scripts.command import command
    from ..scripts.hub import read_configs
    from ..scripts.run import run_script
    from ..scripts.watch import RAN_OUT_OF_MEMORY, Conditions

    script = command(["-m", *words] if module else words)
    limit = None if max_gib is None else round(max_gib * GiB)
    where = Conditions(find_gpu(name), _ranks(script, world_size, nodes, gpus_per_node), steps, limit, assume, roomy)

    def keep(watch: Watch) -> None:
        if snapshot:
            watch.sim.save_snapshot(snapshot)
        if timeline:
            watch.sim.timeline.plot().savefig(timeline)

    with (
        tempfile.TemporaryDirectory(prefix="llmlab-run-") as thrown_away,
        redirect_stdout(sys.stderr) if as_json else nullcontext(),
        _progress() as on_step,
    ):
        report = run_script(script, where, out or thrown_away, read_configs(configs), on_step, keep)
    if report.ended == RAN_OUT_OF_MEMORY:
        return replace(report, needed=_needed(report, words, module, assume, configs))
    return report


def _ranks(script: Command, world_size: int | None, nodes: int | None, gpus_per_node: int | None) -> int:
    """Return the ranks that the options ask for, else those of the script's launcher."""
    if world_size is not None and (nodes or gpus_per_node) is not None:
        raise SpecError("--world-size beside --nodes or --gpus-per-node; give the ranks, or the nodes and their GPUs")
    if world_size is not None:
        return world_size
    nodes, gpus_per_node = nodes or script.nodes, gpus_per_node or script.gpus_per_node
    if nodes is None and gpus_per_node is None:
        return 1
    # A launcher that takes all GPUs of a machine names no number of them.
    return (nodes or 1) * (gpus_per_node or GPUS_PER_NODE)


@contextmanager
def _progress() -> Iterator[Callable[[Watch], None]]:
    """Show the steps done on a terminal, under what the script prints."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("running, no optimizer step yet") if console.is_terminal else nullcontext() as status:

        def on_step(watch: Watch) -> None:
            if status:
                allocated, reserved = show_bytes(watch.sim.peak_allocated), show_bytes(watch.sim.peak_reserved)
                done = f"{watch.steps} optimizer steps, {watch.passes} backward passes"
                status.update(f"{done}, peak {allocated} allocated, {reserved} reserved")

        yield on_step


def _needed(
    report: ScriptReport, words: tuple[str, ...], module: bool, assume: float | None, configs: tuple[str, ...]
) -> int | None:
    """Run the script again, in a process of its own, on a card with room for one more step than it came to."""
    options = ["--gpu", report.gpu, "--world-size", str(report.world_size), "--steps", str(report.steps + 1)]
    options += ["--assume", str(assume)] if assume is not None else []
    options += [word for each in configs for word in ("--config", each)]
    line = [sys.executable, "-m", "llmlab.cli.main", "run", "--json", "--roomy", *options, *(["-m"] if module else [])]
    done = subprocess.run([*line, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    if done.returncode not in (0, 1):
        return None
    again = loads(done.stdout)  # one that fits now was short of room between its blocks
    return again["needed"] or again["peak_reserved"]
