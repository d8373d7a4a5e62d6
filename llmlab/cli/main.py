"""The command line: the same words as the API, one command per verb.

Exit codes: 0 fits (or the list was printed), 1 does not fit, 2 could not say (also for bad input), 130 interrupted.
An answer goes to stdout whole or not at all; an error is one line on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from inspect import cleandoc
from typing import Any

import click
from click.core import ParameterSource

from .. import hardware, verbs
from ..base.errors import SCRIPT_FAILED, LabWarning, NotAvailable, ScriptFailed, SpecError, UnknownName
from ..base.files import is_library
from ..base.tables import Table, Tabular, show
from ..base.units import GB, GiB, show_bytes, show_count, show_digits
from ..base.version import __version__
from ..hardware.doctor import doctor as check_machine
from ..hardware.gpu import DTYPES, GPU
from ..hardware.gpu import gpu as find_gpu
from ..report import Comparison, Report
from ..specs.generic import UNBOUNDED
from ..specs.hub_cache import download_config
from ..specs.model import model as find_model
from ..specs.model import models as presets
from ..specs.run import Training
from .in_options import in_options
from .options import EXIT_CODES, GENERATION, MODEL, changed, cluster_from, cluster_options, run_from, spec_options
from .plan import add_fix, add_plan
from .run import add_run
from .serve import add_serve

EXIT = {"fits": 0, "out of memory": 1, "unknown": 2}
INTERRUPTED = 130  # 128 + SIGINT, as a shell says it


# Of options that a command cannot do without: a value, for the error that one is missing.
EXAMPLES = {"--gpu": "T4", "--gpus": "8xH100-80GB", "--global-batch": "64", "--for": "seq-len"}


class OneLineErrors(click.Group):
    """A click group that prints an error as one line on stderr and exits with the code that the command returns."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (SpecError, UnknownName, NotAvailable) as error:
            command = self.commands[ctx.invoked_subcommand or ""]
            raise click.ClickException(in_options(str(error), command)) from error

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> None:  # type: ignore[override]
        extra.pop("standalone_mode", None)
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                code = super().main(args, prog_name or "llmlab", standalone_mode=False, **extra)
        except click.NoSuchOption as error:
            code = _fail(_no_such_option(error))
        except click.MissingParameter as error:
            option = error.param.opts[0] if error.param else ""
            example = f" For example: {option} {EXAMPLES[option]}" if option in EXAMPLES else ""
            code = _fail(error.format_message() + example)
        except click.ClickException as error:
            code = _fail(error.format_message())
        except ScriptFailed as error:
            click.echo(str(error), err=True)
            code = _fail(SCRIPT_FAILED)
        except OSError as error:
            code = _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except (click.Abort, KeyboardInterrupt):
            code = _fail("interrupted", INTERRUPTED)
        sys.exit(code or 0)


@click.group(cls=OneLineErrors, invoke_without_command=True,
             epilog=f"{EXIT_CODES} Some commands have other exit codes, which their help lists.")
@click.version_option(__version__, message="llmlab %(version)s")
@click.pass_context
def cli(context: click.Context) -> int:
    """Predict and measure the cost of training and running a language model: GPU memory, time and money."""
    if context.invoked_subcommand is None:
        _print(context.get_help())
    return 0


# ---- the verbs


def _verb(command: Callable[..., int]) -> click.Command:
    """Make `command`, about the run of a MODEL, a command of the group that also takes the options of every spec."""
    text = f"{cleandoc(command.__doc__ or '')}\n\n{MODEL}"
    made = cli.command(help=text, epilog=EXIT_CODES)(click.pass_context(command))
    made.params += spec_options()
    return made


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes.")
_model = click.argument("model")
_gpu = partial(click.option, "--gpu", metavar="NAME")


def _answer(report: Report, as_json: bool) -> int:
    """Print a report and return the exit code of its outcome."""
    _print(report.to_json() if as_json else report)
    return EXIT[report.outcome]


@_verb
@_model
@_gpu(help="A GPU that `llmlab gpus` lists, a memory size such as 48GB, or cpu. Without --gpu, the command prints the "
      "memory that the run needs. Whether the run fits is then unknown, so the exit code is 2.")  # fmt: skip
@click.option("--power", type=float, metavar="W",
              help="Power limit of the GPU in watts. Default: the vendor's power limit.")  # fmt: skip
@click.option("--vs", metavar="OPTIONS",
              help="Show a second run next to the first. OPTIONS are the options that differ, in quotes. An example is "
              "--vs '--zero 3 --checkpointing full'. The exit code describes the first run.")  # fmt: skip
@click.option("--lengths", metavar="FILE", help="FILE contains the lengths of the training sequences in tokens, one "
              "per line or as a JSON list. Each batch is padded to its longest sequence. --lengths replaces "
              "--seq-len.")  # fmt: skip
@cluster_options
@_json
def estimate(context: click.Context, vs: str | None, lengths: str | None, as_json: bool, **_: Any) -> int:
    """Estimate the memory and time of a training step or of text generation.

    The command evaluates formulas, so it takes about a second.
    """
    if lengths is not None:
        if vs is not None:
            raise SpecError("--lengths and --vs exclude each other; leave out one of them")
        return _of_lengths(context, lengths, as_json)
    report = _estimated(context)
    if vs is None:
        return _answer(report, as_json)
    both = Comparison((report, _estimated(changed(context, vs, "--vs"))))
    _print(both.to_json() if as_json else both)
    return EXIT[report.outcome]


def _estimated(context: click.Context) -> Report:
    return verbs.estimate(context.params["model"], run_from(context), _device(context), cluster_from(context))


def _device(context: click.Context) -> GPU | str | None:
    name, power = context.params["gpu"], context.params["power"]
    if power is not None and name is None:
        raise SpecError("--power needs --gpu; name the GPU that has this power limit")
    return name if name is None or power is None else find_gpu(name, power)


def _of_lengths(context: click.Context, file: str, as_json: bool) -> int:
    from ..planning.lengths import padded, read_lengths

    run = run_from(context)
    if not isinstance(run, Training):
        raise SpecError("--lengths is for training steps; leave out the options of generation")
    if context.get_parameter_source("seq_len") is ParameterSource.COMMANDLINE:
        raise SpecError("--lengths and --seq-len both say how long sequences are; leave out one of them")
    lengths = padded(context.params["model"], run, _device(context), read_lengths(file), cluster_from(context))
    _print(_dump(lengths.to_dict()) if as_json else lengths)
    return EXIT[lengths.worst.outcome]


@_verb
@_model
@_gpu(required=True, help="A GPU that `llmlab gpus` lists, a memory size such as 48GB, or cpu.")
@_json
def simulate(context: click.Context, model: str, gpu: str, as_json: bool, **_: Any) -> int:
    """Simulate a training step or text generation without a GPU.

    The model's PyTorch code runs on fake tensors, which have shapes and dtypes but no data. A model of PyTorch's CUDA
    allocator computes the memory that these tensors would need on the GPU.
    """
    return _answer(verbs.simulate(model, run_from(context), gpu), as_json)


@_verb
@_model
@_gpu(required=True, help="GPU (a name listed by `llmlab gpus`).")
@click.option("--latex", is_flag=True, help="Print the formula as LaTeX.")
@_json
def explain(context: click.Context, model: str, gpu: str, latex: bool, as_json: bool, **_: Any) -> int:
    """Print the formula of the peak memory of a training step.

    The formula is derived from the code of transformers, and the table has a row for each kind of tensor alive at the
    peak.
    """
    run = run_from(context)
    if latex and as_json:
        raise SpecError("--latex and --json exclude each other; leave out one of them")
    if not isinstance(run, Training):
        raise SpecError("explain has formulas of training steps; leave out the options of generation")
    explanation = verbs.explain(model, run, gpu)
    _print(explanation.latex() if latex else _dump(explanation.to_dict()) if as_json else explanation.table())
    return 0


explain.epilog = "Exit codes: 0 = the formula is printed; 2 = invalid input, or the step has no formula."


@_verb
@_model
@click.option("--for", "name", required=True, metavar="SIZE",
              help="For training: seq-len, micro-batch or lora-rank. For generation: seq-len or batch. For both: gpu.")
@_gpu(help="GPU that the run must fit (a name listed by `llmlab gpus`, or a memory such as 48GB); not with --for gpu.")
@click.option("--simulate/--no-simulate", default=True, show_default=True,
              help="Confirm the answer by simulation, which takes minutes, or by estimates alone.")  # fmt: skip
@_json
def solve(
    context: click.Context, model: str, name: str, gpu: str | None, simulate: bool, as_json: bool, **_: Any
) -> int:
    """Find the largest run that fits a GPU, or the smallest GPU.

    For example, --for seq-len finds the longest sequence. Omit the option that you solve for.
    """
    size = name.replace("-", "_")
    if context.params.get(size) is not None and context.get_parameter_source(size) is ParameterSource.COMMANDLINE:
        raise SpecError(f"--{size.replace('_', '-')} is the size that --for {name} finds; leave it out")
    solution = verbs.solve(model, run_from(context), gpu, size, simulate=simulate)
    _print(_dump(solution.to_dict()) if as_json else solution)
    return EXIT[solution.outcome]


solve.epilog = "Exit codes: 0 = a size or a GPU fits; 1 = none fits; 2 = llmlab cannot tell, or the input is invalid."


@_verb
@_model
@click.option("--device", metavar="NAME", help="cuda, mps or cpu; default: the first of these that this machine has.")
@_json
def measure(context: click.Context, model: str, device: str | None, as_json: bool, **_: Any) -> int:
    """Measure memory and time of a run on this machine.

    The weights are random.
    """
    return _answer(verbs.measure(model, run_from(context), device), as_json)


@_verb
@_model
@_gpu(help="GPU (a name listed by `llmlab gpus`), or cpu; default: the GPU of this machine.")
@click.option("--measure", is_flag=True, help="Measure the run on this machine now, instead of showing records of it.")
@cluster_options
@_json
def compare(context: click.Context, model: str, gpu: str | None, measure: bool, as_json: bool, **_: Any) -> int:
    """Compare estimate, simulation and records of a run.

    The exit code follows the most reliable of them: a measurement, a published result, the simulation, the estimate.
    """
    comparison = verbs.compare(model, run_from(context), gpu, measure=measure, cluster=cluster_from(context))
    _print(comparison.to_json() if as_json else comparison)
    return EXIT[best_outcome(comparison.reports)]


def best_outcome(reports: Sequence[Report]) -> str:
    """Return the outcome of the most trustworthy report that has one: measured, published, simulated, estimated."""
    for source in ("measured", "published", "simulated", "estimated"):
        for report in reports:
            if report.source == source and report.outcome != "unknown":
                return report.outcome
    return "unknown"


# ---- the lists


def _list(entries: Any, table: Table | Tabular, as_json: bool) -> int:
    _print(_dump(entries) if as_json else table)
    return 0


@cli.command()
@_json
def gpus(as_json: bool) -> int:
    """List the GPUs: memory, bandwidth, peak FLOP/s."""
    gpus = hardware.gpus()
    rows = []
    for gpu in gpus:
        peaks = ["–" if (peak := gpu.peak(dtype)) is None else show_digits(peak / 1e12, 4) for dtype in DTYPES]
        capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "–"
        rows.append((gpu.name, f"{gpu.memory / GiB:.2f}", f"{gpu.bandwidth / GB:,.0f}", *peaks, capability))
    header = ("name", "GiB", "GB/s", *DTYPES, "capability")
    units = "Memory is in GiB (2^30 bytes), bandwidth in 10^9 bytes/s, dense peaks in 10^12 FLOP/s. "
    table = Table(header, rows, footer=units + "A dash means that the GPU has none, or that it is unknown.")
    return _list([asdict(gpu) for gpu in gpus], table, as_json)


@cli.command()
@click.option("--download", multiple=True, metavar="NAME", help="Download the config.json of this model "
              "(OWNER/NAME) from the Hugging Face Hub; every command then knows the model. Repeatable.")  # fmt: skip
@_json
def models(download: tuple[str, ...], as_json: bool) -> int:
    """List the built-in models, or download a model's config.json.

    With --download, only the downloaded models are listed.
    """
    keys = ("name", "parameters", "layers", "hidden", "heads", "kv_heads", "max_positions")
    for name in download:
        download_config(name)
    entries = [{key: getattr(spec, key) for key in keys} for spec in map(find_model, download or presets())]
    rows = []
    for name, parameters, layers, hidden, heads, kv_heads, positions in (entry.values() for entry in entries):
        limit = f"{positions:,}" if positions < UNBOUNDED else "–"
        rows.append((name, show_count(parameters), str(layers), str(hidden), f"{heads}/{kv_heads}", limit))
    return _list(entries, Table(("name", "parameters", "layers", "hidden", "heads/kv", "positions"), rows), as_json)


@cli.command()
@click.argument("model", required=False)
@_gpu(help="Only records of this GPU (a name listed by `llmlab gpus`), or of cpu.")
@click.option("--source", type=click.Choice(["measured", "published"]),
              help="Only our own measurements (measured), or only published ones (published).")  # fmt: skip
@_json
def records(model: str | None, gpu: str | None, source: str | None, as_json: bool) -> int:
    """List recorded measurements, our own and published ones.

    Without MODEL, the records of all models are listed.
    """
    reports = verbs.records(model, gpu=gpu, source=source)
    if not reports and not as_json:
        _print("There are no such records.")
        return 0
    rows = []
    for r in reports:
        sizes = show_bytes(r.peak_allocated), show_bytes(r.peak_reserved)
        rows.append((r.model, r.gpu or "–", r.source, r.environment.get("date", "–"), r.outcome, *sizes, repr(r.run)))
    header = ("model", "gpu", "source", "date", "outcome", "allocated", "reserved", "run")
    return _list([report.to_dict() for report in reports], Table(header, rows, words=(0, 1, 2, 3, 4, 7)), as_json)


@cli.command()
@_json
def doctor(as_json: bool) -> int:
    """Show this machine's hardware and the chapters that it can run.

    The versions of the installed libraries are shown too.
    """
    checks = check_machine()
    return _list(checks.to_dict(), checks, as_json)


@cli.command()
@click.option("--budget", type=float, default=540, show_default=True,
              help="Time limit in seconds; the next call continues where this one ends.")  # fmt: skip
@click.option("--only", multiple=True, metavar="CHAPTER", help="Measure only the runs of this chapter. Repeatable.")
@click.option("--out", metavar="DIR", help="Folder for the records; default: the package's folder in a checkout of the "
              "repository, otherwise your own.")  # fmt: skip
@click.option("--allow-cpu", is_flag=True, help="Measure on the CPU if there is no GPU; needs --out.")
@_json
def record(budget: float, only: tuple[str, ...], out: str | None, allow_cpu: bool, as_json: bool) -> int:
    """Measure the book's runs on this GPU (for contributors).

    The results are saved as records, which `llmlab records` lists.
    """
    from rich.console import Console

    from ..measurement.record import record

    # Progress is for people; with --json it makes room for the answer.
    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    done = record(budget, only or None, out, allow_cpu=allow_cpu, console=console)
    if as_json:
        skipped = [{"model": item.model, "run": item.run.to_dict(), "reason": reason} for item, reason in done.skipped]
        answer = {"path": str(done.path), "measured": [report.to_dict() for report in done.measured]}
        _print(_dump({**answer, "known": done.known, "skipped": skipped, "left": done.left}))
    return 0


def _dump(data: Any) -> str:
    return json.dumps(data, indent=1, default=dict)  # read-only mappings are the only thing json does not know


def _print(answer: Table | Tabular | str) -> None:
    """Write the answer to stdout, with the options of the command in the place of Python's fields in a table's notes;
    neither a closed pipe (`| head`) nor a letter that it cannot encode is an error."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    command = click.get_current_context().command
    try:
        # The notes of a plan are about the runs in its table, whose fields are no options of it.
        show(answer, str if command.name == "plan" else lambda notes: in_options(notes, command))
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more on exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _no_such_option(error: click.NoSuchOption) -> str:
    """Return the message of an unknown option, with the nearest ones and those that share a word. It marks options of
    generation, which switch to it. A field of the run that `llmlab plan` varies is one of --fixed."""
    message, field = error.message, error.option_name.lstrip("-").replace("-", "_")
    known = [option for option in error.ctx.command.params if isinstance(option, click.Option)] if error.ctx else []
    if field in Training.__dataclass_fields__ and any(option.name == "fixed" for option in known):
        return f"{message} To fix this field of the run give --fixed {field}=VALUE."
    names = [option.opts[0] for option in known if not option.is_flag]
    alike = [name for name in names if name.split("-")[-1] in field.split("_")]
    generates = {f"--{name.replace('_', '-')}" for name in GENERATION if any(o.name == "inference" for o in known)}
    near = sorted(dict.fromkeys((*alike, *(error.possibilities or ()))), key=lambda name: name in generates)
    choices = [f"{name} (for generation)" if name in generates else name for name in near]
    return f"{message} Did you mean {' or '.join(choices)}?" if choices else message


def _fail(message: str, code: int = 2) -> int:
    click.echo(f"llmlab: {' '.join(message.split())}", err=True)
    return code


def _warn(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
    if issubclass(category, LabWarning):
        place = "" if is_library(filename) else f" ({filename}, line {lineno})"  # of a script
        _fail(f"warning: {message}{place}")
    else:
        click.echo(f"{filename}, line {lineno}: {category.__name__}: {' '.join(str(message).split())}", err=True)


add_run(cli, _print)
add_plan(cli, _print)
add_fix(cli, _print)
add_serve(cli, _print)


def main() -> None:
    """Run the command line; never returns."""
    cli(prog_name="llmlab")
