"""`llmlab serve`: memory, latency and price of a served model, its frontier, and the cheapest deployment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import click

from .. import verbs
from ..base.errors import SpecError
from ..base.notes import Note
from ..base.tables import Table, Tabular
from ..base.units import show_seconds
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.gpu import gpus as all_gpus
from ..serving.service import HELP, Service
from ..specs.model import model as find_model
from .in_options import in_options
from .options import picture_file

if TYPE_CHECKING:
    from ..serving.report import ServingReport

# Fields of a service that such an answer sets itself.
TRIED = {"--slo": ("tp", "ep", "dp_attention", "concurrency"), "--frontier": ("concurrency", "rate")}


def add_serve(group: click.Group, show: Callable[[Table | Tabular | str], None]) -> None:
    """Add the command to `group`; `show` prints an answer."""

    @group.command(
        epilog="Exit codes: 0 = the model fits, or a deployment meets --slo; 1 = it does not fit, or none meets --slo; "
        "2 = invalid input."
    )
    @click.argument("model")
    @click.option("--gpu", "--gpus", "gpu", metavar="GPUS",
                  help="GPUs of one deployment, for example H100 or 8xH200; names as listed by `llmlab gpus`. With "
                  "--slo, name a GPU without a number; the default there is the value `any`, which compares all GPU "
                  "models whose kernels were measured.")
    @click.option("--slo", metavar="ttft=TIME,tpot=TIME",
                  help="Find the cheapest deployments on --gpu that answer --rate requests per second with a median "
                  "TTFT and TPOT within these limits, for example ttft=1s,tpot=30ms.")
    @click.option("--frontier", is_flag=True, help="Print latency and throughput for 1, 2, 4, ... users, up to the "
                  "number of users whose requests fit in the KV cache.")
    @click.option("--plot", metavar="FILE", callback=picture_file,
                  help="Draw the points of --frontier into FILE: .png, .svg or .pdf.")
    @click.option("--users", type=int, metavar="N",
                  help="Print how many tokens each of N users can have in the cache, and the smallest "
                  "--gpu-memory-utilization for N requests of --prompt-len plus --output-len tokens.")
    @click.option("--launch", is_flag=True, help="Print the command that starts the server.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes and times in seconds.")
    def serve(
        model: str, gpu: str | None, slo: str | None, frontier: bool, plot: str | None, users: int | None, launch: bool,
        as_json: bool, **given: Any,
    ) -> int:
        """Predict memory, latency, throughput and price of a served model.

        MODEL is a name listed by `llmlab models`, OWNER/NAME of a model in the Hugging Face cache, or the path of a
        config.json or of its folder.
        """
        name, count = _gpus(gpu)
        options = {key: value for key, value in given.items() if value is not None}
        service = _service(options, count)
        if plot and not frontier:
            raise SpecError(f"--plot {plot} draws the points of --frontier; give --frontier as well")
        answers = {"--slo": slo is not None, "--frontier": frontier, "--users": users is not None, "--launch": launch}
        _check_answers([flag for flag, asked in answers.items() if asked], options)
        if slo is not None and count > 1:
            raise SpecError(f"--slo finds the number of GPUs, and --gpu {gpu} gives one; give --gpu {name}")
        if slo is not None:
            return _sized(show, model, service, name, slo, as_json)
        if name is None:
            why = "--gpu is missing" if gpu is None else "--gpu any is for --slo"
            raise SpecError(f"{why}; name the GPUs of the deployment, for example --gpu 8xH200")
        if users is not None:
            return _room(show, model, service, name, users, as_json)
        if launch:
            return _launched(show, model, service, name, as_json)
        if frontier and (code := _frontier(show, model, service, name, plot, as_json)) is not None:
            return code
        report = verbs.serve(model, service, name)
        show(_dump(report.to_dict()) if as_json else _text(report))
        return 0 if report.outcome == "fits" else 1

    serve.params += [_option(name, hint, getattr(Service, name)) for name, hint in get_type_hints(Service).items()]


def _option(name: str, hint: Any, default: Any) -> click.Option:
    """Return the option for a field of Service, None where it is not given; a bool has --NAME and --no-NAME."""
    kind = next(kind for kind in (hint, *get_args(hint)) if kind in (bool, int, float, str))
    word = name.replace("_", "-")
    flags = f"--{word}/--no-{word}" if kind is bool else f"--{word}"
    shown = "" if name == "tp" or default is None else f"  [default: {default}]"
    return click.Option([flags, name], type=kind, default=None, help=HELP[name] + shown)


def _text(report: ServingReport) -> str:
    """Return the report as text, with this command's options in its notes."""
    command = click.get_current_context().command
    return str(replace(report, notes=tuple(Note(note.code, in_options(note, command)) for note in report.notes)))


def _gpus(text: str | None) -> tuple[str | None, int]:
    """Return the GPU's name and how many there are in "8xH200"."""
    if text in (None, "any"):
        return None, 1
    match = re.fullmatch(r"(\d+)\s*[x×*]\s*(.+)", text)
    return (match[2], int(match[1])) if match else (text, 1)


def _check_answers(asked: list[str], options: dict[str, Any]) -> None:
    """Raise SpecError for two answers that are `asked` for, and for an option whose value the answer finds."""
    if len(asked) > 1:
        raise SpecError(f"{' and '.join(asked)} ask for different answers; give one of them")
    if both := [name for flag in asked for name in TRIED.get(flag, ()) if name in options]:
        raise SpecError(f"{asked[0]} tries values of {both[0]}={options[both[0]]}; leave out one of them")


def _service(options: dict[str, Any], count: int) -> Service:
    """Return the service of `options` on `count` GPUs, which serve one copy of the model unless `tp` says otherwise."""
    stages = max(1, options.get("pp", 1))
    if count > 1 and "tp" in options and options["tp"] * stages != count:
        used = f"--tp {options['tp']} with --pp {stages} uses {options['tp'] * stages} of the {count} GPUs of --gpu"
        raise SpecError(f"{used}, and one copy of the model uses all of them; leave --tp out")
    if "tp" not in options and count % stages:
        raise SpecError(f"--pp {stages} does not divide the {count} GPUs of --gpu; give a divisor, or --tp as well")
    return Service(**{"tp": count // stages, **options})


def _launched(show: Callable, model: str, service: Service, gpu: str, as_json: bool) -> int:
    from ..serving.launch import launch_line
    from ..serving.memory import necessary_limit
    from ..serving.report import possible

    spec, device = find_model(model), find_gpu(gpu)
    service = possible(spec, service, device)
    if limit := necessary_limit(spec, service, device):
        service = replace(service, max_model_len=limit)
    line = launch_line(spec.name, service)
    show(_dump({"command": line}) if as_json else line)
    return 0


def _frontier(
    show: Callable, model: str, service: Service, gpu: str, plot: str | None, as_json: bool
) -> int | None:
    """Show the frontier and return the exit code, or None if there is no point to show."""
    from ..serving.sizing import frontier, frontier_table

    points = frontier(find_model(model), service, find_gpu(gpu))
    if points and plot:
        from ..plots.frontier import plot_frontier

        plot_frontier({f"{service.gpus} × {find_gpu(gpu).name}": points}).savefig(plot)
    if not points and not as_json:
        return None
    show(_dump([asdict(point) for point in points]) if as_json else frontier_table(points))
    return 0 if points else 1


def _room(show: Callable, model: str, service: Service, gpu: str, users: int, as_json: bool) -> int:
    from ..serving.sizing import least_utilization, longest_context

    if users < 1:
        raise SpecError(f"--users {users}: give 1 or more")
    spec, device = find_model(model), find_gpu(gpu)
    tokens = longest_context(spec, service, device, users)
    share = None if service.engine == "llama.cpp" else least_utilization(spec, service, device, users)
    if as_json:
        show(_dump({"longest_context": tokens, "gpu_memory_utilization": share}))
    else:
        words = f"Each of {users:,} users can have {tokens:,} tokens"
        if service.engine == "llama.cpp":
            show(f"{words} with all layers, or --n-gpu-layers of them, on the GPU.")
            return 0 if tokens else 1
        least = f"--gpu-memory-utilization {share:.3f} at least" if share else f"more than one {device.name} has"
        show(f"{words}. Requests of {service.prompt_len + service.output_len:,} tokens need {least}.")
    return 0 if tokens else 1


def _sized(show: Callable, model: str, service: Service, gpu: str | None, slo: str, as_json: bool) -> int:
    from ..serving.kernels import engine_kernels
    from ..serving.sizing import deployment_table, deployments, separated

    if service.rate is None:
        raise SpecError("--slo needs --rate; give the requests per second that must be answered")
    pairs = [_limit(part) for part in slo.split(",")]
    if sorted(name for name, _ in pairs) != ["tpot", "ttft"]:
        raise SpecError(f"--slo {slo}: give both, and each once, for example ttft=1s,tpot=30ms")
    limits = dict(pairs)
    devices = [find_gpu(gpu)] if gpu else [one for one in map(find_gpu, all_gpus()) if engine_kernels(one).measured]
    options = deployments(find_model(model), service, service.rate, limits["ttft"], limits["tpot"], devices)
    if as_json:
        show(_dump([asdict(one) | {"gpus": one.gpus, "usd_per_hour": one.usd_per_hour} for one in options]))
    elif options:
        show(deployment_table(options))
        device = find_gpu(options[0].point.gpu)
        level = service.rate, limits["ttft"], limits["tpot"]
        apart = None if service.engine == "llama.cpp" else separated(find_model(model), service, *level, device)
        if apart:
            gpus = f"you need {apart.prefill} for prompts and {apart.decode} for answers (tp={apart.tp})"
            times = f"TTFT is {show_seconds(apart.ttft)} and TPOT {show_seconds(apart.tpot)}"
            show(f"With prefill and decode on separate {device.name}, {gpus}; {times}.")
    else:
        show("No deployment of up to 8 GPUs meets this service level.")
        show(f"With one user alone:\n\n{_text(_alone(model, service, devices))}")
    return 0 if options else 1


def _alone(model: str, service: Service, gpus: list[GPU]) -> ServingReport:
    """Return the report of one user on the GPU with most memory, on as many as divide the model."""
    from ..serving.sizing import DEGREES

    for gpu in sorted(gpus, key=lambda gpu: -gpu.memory):
        for degree in reversed(DEGREES):
            one = replace(service, tp=degree, ep=1, dp_attention=1, rate=None, concurrency=1)
            try:
                return verbs.serve(model, one, gpu)
            except SpecError as error:
                refused = error
    raise refused


def _limit(text: str) -> tuple[str, float]:
    match = re.fullmatch(r"\s*(ttft|tpot)\s*=\s*(\d+\.?\d*|\.\d+)\s*(ms|s)\s*", text)
    if not match:
        raise SpecError(f"--slo: {text!r} is not a limit with a name and a unit; write --slo ttft=1s,tpot=30ms")
    return match[1], float(match[2]) * (1e-3 if match[3] == "ms" else 1)


def _dump(data: Any) -> str:
    return json.dumps(data, indent=1, default=str)
