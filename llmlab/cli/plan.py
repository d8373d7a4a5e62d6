"""`llmlab plan` and `llmlab fix`: a decision, and what would make a run fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .. import verbs
from ..base.errors import SpecError
from ..base.tables import Tabular
from ..recording.snapshot import is_snapshot
from ..specs.stacks import STACKS, TRANSFORMERS
from .options import cluster_from, cluster_options, run_from, spec_options


def add_plan(group: click.Group, show: Callable[[Tabular | str], None]) -> None:
    """Add the command to `group`; `show` prints an answer."""

    @group.command(
        epilog="Exit codes: 0 = a configuration fits; 1 = no configuration fits; 2 = llmlab cannot tell, or the input "
        "is invalid; 130 = the search was interrupted before it found a configuration."
    )
    @click.argument("model")
    @click.option("--gpus", "--gpu", "gpus", required=True, metavar="GPUS",
                  help="Your GPUs, for example T4, 8xH100-80GB, or 2x8xA100-80GB (2 nodes with 8 GPUs each).")
    @click.option("--global-batch", required=True, type=int, help="Sequences per optimizer step, summed over all GPUs.")
    @click.option("--method", default="full", show_default=True, help="Weights to train. full = all weights; "
                  "lora = LoRA adapters; qlora = LoRA adapters on nf4 weights.")
    @click.option("--allow", multiple=True, metavar="NAME",
                  help="Let the search try more values of an option. NAME is one of these: optimizer = other "
                  "optimizers; precision = bf16 weights; kernels = Liger Kernel; fp8 = fp8 matmuls; lora = LoRA and "
                  "QLoRA adapters; seq_len = shorter sequences. You can repeat --allow.")
    @click.option("--fixed", multiple=True, metavar="FIELD=VALUE",
                  help="Use VALUE in every configuration, for example --fixed seq_len=4096. FIELD is a field "
                  "of `llmlab.Training`; most are options of `llmlab estimate`, with underscores instead of hyphens. "
                  "You can repeat --fixed.")
    @click.option("--tokens", type=int, help="Number of training tokens. The total training time is computed from "
                  "this number.")
    @click.option("--within", type=float, metavar="DAYS", help="Maximum training time in days. This option requires "
                  "--tokens.")
    @click.option("--goal", default="fastest", show_default=True,
                  help="Criterion of the search. fastest = least time; cheapest = lowest cost; smallest = least "
                  "memory.")
    @click.option("--stack", default="transformers", show_default=True,
                  help=f"Library that trains the model. One of {', '.join((TRANSFORMERS, *STACKS))}. A colon separates "
                  "the library from its own options: torchtitan:ac=full. If the library or its option is unknown, the "
                  "error message lists the valid ones.")
    @click.option("--write", "folder", metavar="DIR",
                  help="Write the launch files of the best configuration to the folder DIR.")
    @click.option("--force", is_flag=True, help="Allow --write to replace existing files.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes.")
    def plan(
        model: str, gpus: str, global_batch: int, fixed: tuple[str, ...], folder: str | None, force: bool,
        as_json: bool, **asked: Any,
    ) -> int:
        """Search for the best training configuration on your GPUs.

        Formulas rank the configurations, and simulations confirm the best ones. Ctrl-C stops the search and prints the
        best configurations found so far.

        In the output, * marks memory that was estimated with formulas, because llmlab cannot simulate the
        configuration. The sign † marks a configuration that uses torch.compile but was simulated without it. The
        compiled step needs at most the memory that is shown.

        With --goal cheapest, the search also tries every other GPU model whose price is known. The search never uses
        more GPUs than --gpus.

        MODEL is a name that `llmlab models` lists, the OWNER/NAME of a model in the local Hugging Face cache, or the
        path of a config.json file (or of its folder).
        """
        if force and folder is None:
            raise SpecError("--force replaces the files of --write; give --write DIR as well")
        answer = verbs.plan(model, gpus, global_batch, fixed=dict(map(_field, fixed)), **asked)
        show(json.dumps(answer.to_dict(), indent=1, default=dict) if as_json else answer)
        if folder is not None and answer.best:
            written = answer.best.write(folder, force, model)
            if not as_json:
                show(written)
        if answer.interrupted and not answer:
            raise click.Abort
        return 0 if answer else 1


def add_fix(group: click.Group, show: Callable[[Tabular | str], None]) -> None:
    """Add the command to `group`; `show` prints an answer."""

    @group.command(
        epilog="Exit codes: 0 = the run fits without a change or with one of the changes, or the message or snapshot "
        "was explained; 1 = the run does not fit with any single change; 2 = llmlab cannot tell, or the input is "
        "invalid."
    )
    @click.pass_context
    @click.argument("words", nargs=-1, metavar="[SNAPSHOT]... [MODEL | MESSAGE]")
    @click.option("--gpu", metavar="NAME",
                  help="A GPU that `llmlab gpus` lists, a memory size such as 48GB, or cpu. MODEL requires --gpu.")
    @cluster_options
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    def fix(context: click.Context, words: tuple[str, ...], gpu: str | None, as_json: bool, **_: Any) -> int:
        """List changes that reduce the memory of a run, or explain an error message or a memory snapshot.

        With MODEL, the command lists changes that save memory. Changes that cost no time come first. The other changes
        are sorted by their added time per saved GiB. MODEL is a name that `llmlab models` lists, the OWNER/NAME of a
        model in the local Hugging Face cache, or the path of a config.json file (or of its folder).

        With SNAPSHOT, the command prints the peak memory by part and by module, the fragmentation, and the memory that
        grew between steps. SNAPSHOT is a file that torch.cuda.memory._dump_snapshot wrote. If you give two snapshots,
        for example of two ranks, the command also compares them.

        With MESSAGE, the command explains PyTorch's out-of-memory message. MESSAGE is the quoted text or a log file.
        Without arguments, the command reads the message from stdin.
        """
        snapshots, models = [word for word in words if is_snapshot(word)], [w for w in words if not is_snapshot(w)]
        message = None if words else sys.stdin.read()
        if len(models) == 1 and gpu is None and (message := _message(models[0])) is not None:
            models = []
        if len(snapshots) > 2 or len(models) > 1:
            raise SpecError(f"fix got {' '.join(words)}; give at most two snapshots and one MODEL")
        given = [option.opts[0] for option in context.command.params if option.name not in ("words", "as_json")
                 and context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE]  # fmt: skip
        if given and not models:
            raise SpecError(f"{given[0]} describes the run of a MODEL, and none was given; give one")
        answers: dict[str, Any] = {}
        if snapshots:
            answers["snapshot"] = verbs.fix(snapshots[0], against=snapshots[1] if len(snapshots) == 2 else None)
        if message is not None:
            answers["message"] = verbs.fix(message)
        if models:
            if gpu is None:
                raise SpecError("fix needs --gpu NAME if a MODEL is given; `llmlab gpus` lists the names")
            answers["changes"] = verbs.fix(models[0], run_from(context), gpu, cluster_from(context))
        if as_json:
            data = {name: answer.to_dict() for name, answer in answers.items()}
            show(json.dumps(data if len(data) > 1 else data.popitem()[1], indent=1, default=dict))
        else:
            for answer in answers.values():
                show(answer)
        if not models:
            return 0
        changes = answers["changes"]
        outcomes = {changes.report.outcome, *(lever.report.outcome for lever in changes.levers)}
        return 0 if "fits" in outcomes else 2 if "unknown" in outcomes else 1

    fix.params += spec_options()


def _message(word: str) -> str | None:
    """Return the text of a message or of a log file; None for the name or the path of a model."""
    path = Path(word)
    if " " in word and not path.exists():
        return word
    log = path.suffix in (".txt", ".log", ".out", ".err") and path.is_file()
    return path.read_text(encoding="utf-8", errors="replace") if log else None


def _field(text: str) -> tuple[str, Any]:
    """Return a field of a run and its value, which is checked as that of a file is."""
    name, equals, value = text.partition("=")
    if not equals:
        raise SpecError(f"--fixed {text!r} is not FIELD=VALUE; give, for example, --fixed seq_len=4096")
    read: Any = {"none": None, "true": True, "false": False}.get(value.lower(), value)
    if isinstance(read, str) and read.isdigit():
        read = int(read)
    return name, read
