"""The files that start a run, written into a folder all together or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import SpecError
from ...base.tables import Table, Tabular
from ...base.version import MEGATRON
from ...engines.texts import toml_text, yaml_text
from ...engines.torchtitan import RELEASE, torchtitan_config
from ...engines.tuners import axolotl_config, llama_factory_config, megatron_arguments
from ...specs.check import check
from ...specs.model import ModelSpec, models
from ...specs.run import Training, stack_of
from .launch import launch_script, sky_task, slurm_job
from .script import deepspeed_settings, kind, packages, training_script, uses_deepspeed


@dataclass(frozen=True, repr=False)
class Written(Tabular):
    """The files in `folder`: `files` maps each name to its purpose, `left_out` each missing file to the reason."""

    folder: Path
    files: dict[str, str]
    left_out: dict[str, str]

    def _table(self) -> Table:
        rows = [*self.files.items(), *((name, f"left out: {why}") for name, why in self.left_out.items())]
        return Table(("file", "what it is"), rows, f"Written into {self.folder}", words=(0, 1))

    def __repr__(self) -> str:
        return f"<Written: {', '.join(self.files)} in {self.folder}>"


Texts = dict[str, tuple[str, str]]  # by file name: its text and its purpose


def texts(spec: ModelSpec, run: Training, gpu: str, nodes: int, per_node: int) -> tuple[Texts, dict[str, str]]:
    """Return the text and purpose of each file, and the reason for each file that is left out. Raises SpecError if no
    file can start the run, or if it is for another number of GPUs."""
    check(spec, run)
    if run.world_size != nodes * per_node:
        raise SpecError(f"the run is for {run.world_size} GPUs, and {nodes} x {per_node} were given; give as many")
    published = spec.name in models()
    model = spec.name if published else "model"
    name = re.sub(r"[^\w./ ()@:+-]", "?", spec.name)  # so that any name of a config stays in its comment
    title = f"{name} on {nodes} x {per_node} {gpu}: {run!r}"
    written: Texts = {}
    left_out: dict[str, str] = {}

    def add(name: str, what: str, text: Callable[[], str]) -> None:
        try:
            written[name] = text(), what
        except SpecError as error:
            left_out[name] = str(error)

    def note(words: str) -> str:
        return f"# {title}.\n# {words}\n"

    add("train.py", "the training script", lambda: training_script(spec, run, model, not published, title))
    add("ds_config.json", "DeepSpeed's settings", lambda: json.dumps(deepspeed_settings(run), indent=2) + "\n")
    add("accelerate.yaml", "accelerate launch --config_file",
        lambda: note(f"accelerate launch --config_file accelerate.yaml; model, {_unsaid(run)} are the script's."
                     + _accumulates(run))
        + yaml_text(run.to_accelerate() | {"num_machines": nodes}))  # fmt: skip
    add("torchtitan.toml", "torchtitan's job config",
        lambda: note(f"For torchtitan {RELEASE}. The learning rate is yours: --optimizer.lr, whose default is 8e-4.")
        + toml_text(torchtitan_config(run, spec.name)))  # fmt: skip
    add("megatron_args.txt", "Megatron-LM's arguments",
        lambda: note("pretrain_gpt.py $(grep -v '^#' megatron_args.txt) --lr ..., and its data and tokenizer.")
        + "\n".join(megatron_arguments(run, spec)) + "\n")  # fmt: skip
    add(
        "axolotl.yaml",
        "Axolotl's settings",
        lambda: note("Yours to add, both required: learning_rate, datasets.") + yaml_text(axolotl_config(run, model)),
    )
    add(
        "llama_factory.yaml",
        "LLaMA-Factory's settings",
        lambda: note("Yours to add: learning_rate, dataset, template.") + yaml_text(llama_factory_config(run, model)),
    )
    if not published:
        written["model/config.json"] = json.dumps(spec.config, indent=2) + "\n", "the model, whose weights start random"
    start, requirements = _started(run, program(spec, run))
    # An engine needs the rank that torchrun sets, even for one process.
    alone = run.world_size == 1 and "train.py" in written and not (run.zero or uses_deepspeed(run))
    # Megatron-LM does not start without it if it overlaps the communication of tensor or context parallelism.
    exports = ["CUDA_DEVICE_MAX_CONNECTIONS=1"] if "megatron_args.txt" in start and max(run.tp, run.cp) > 1 else []
    if stack_of(run).expandable_segments:
        exports.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    if stack_of(run).cuda_launch_blocking:
        exports.append("CUDA_LAUNCH_BLOCKING=1")
    arguments = " --data train.txt" if "train.py" in written else " ..."  # other programs have their own
    started = launch_script(title, start, nodes, per_node, alone, arguments, exports)
    written["launch.sh"] = started, "starts it on one node: LR=... ./launch.sh"
    written["job.sbatch"] = slurm_job(title, nodes, per_node, arguments), "Slurm: LR=... sbatch job.sbatch"
    if task := sky_task(title, gpu, nodes, per_node, requirements, "train.py" in written):
        written["sky.yaml"] = task, "SkyPilot: sky launch sky.yaml"
    else:
        left_out["sky.yaml"] = f"SkyPilot's name of {gpu} is not known here"
    return written, left_out


def program(spec: ModelSpec, run: Training) -> str:
    """Return the file that starts `run`: train.py, torchtitan.toml or megatron_args.txt. Raises SpecError, with a
    reason for each file, if none of them can."""
    if run.images or run.num_labels:
        field = f"images={run.images}" if run.images else f"num_labels={run.num_labels}"
        raise SpecError(f"{field}: the files that llmlab writes train language models of text; try your own script "
                        "with llmlab run")  # fmt: skip
    checks: dict[str, Callable[[], object]] = {
        "train.py": lambda: kind(run), "torchtitan.toml": lambda: torchtitan_config(run, spec.name),
        "megatron_args.txt": lambda: megatron_arguments(run, spec),
    }  # fmt: skip
    reasons = []
    for name, check_run in checks.items():
        try:
            check_run()
            return name
        except SpecError as error:
            reasons.append(f"{name}: {error}")
    raise SpecError(f"no file that llmlab writes can start {run!r}: {'; '.join(reasons)}")


def _unsaid(run: Training) -> str:
    return "its optimizer, attention" + (", adapters" if run.lora else "") + " and the micro-batch"


def _accumulates(run: Training) -> str:
    """Return the comment that says when FSDP reduces gradients, because no key of Accelerate's config does."""
    if run.zero != 3 or run.accumulation == 1:
        return ""
    plugin = f"GradientAccumulationPlugin(num_steps={run.accumulation}, sync_each_batch={run.sync_each_batch})"
    return f"\n# It makes Accelerator(gradient_accumulation_plugin={plugin})."


def _started(run: Training, by: str) -> tuple[str, list[str]]:
    """Return the script that launch.sh starts, with its arguments, and the packages that it needs; `by` is the run's
    `program`."""
    if by == "train.py":
        return 'train.py --lr "$LR"', packages(run)
    if by == "torchtitan.toml":
        start = '-m torchtitan.train --job.config_file torchtitan.toml --optimizer.lr "$LR"'
        return start, [f"torchtitan=={RELEASE}"]
    script = '"${MEGATRON:?the folder of Megatron-LM}/pretrain_gpt.py" $(grep -v "^#" megatron_args.txt) --lr "$LR"'
    return script, [f"megatron-core=={MEGATRON}", "transformer-engine[pytorch]"]


def write_files(
    spec: ModelSpec, run: Training, gpu: str, nodes: int, per_node: int, folder: str | os.PathLike[str], force: bool
) -> Written:
    """Write the files into `folder`, all or none; see `texts`.

    Raises SpecError if one of them exists already and `force` is False, or if the folder cannot be written.
    """
    new_texts, left_out = texts(spec, run, gpu, nodes, per_node)
    target = Path(folder)
    if (existing := sorted(name for name in new_texts if os.path.lexists(target / name))) and not force:
        raise SpecError(f"{target} already has {', '.join(existing)}; give force=True (--force) to replace them, or "
                        "another folder")  # fmt: skip
    try:
        _write_all(target, {name: text for name, (text, _) in new_texts.items()})
    except OSError as error:
        raise SpecError(f"{target} cannot be written: {error.strerror or error}; give another folder") from None
    return Written(target, {name: what for name, (_, what) in new_texts.items()}, left_out)


def _write_all(target: Path, content: dict[str, str]) -> None:
    """Write everything into a temporary folder next to `target`, then move it there, so that a full disk or a crash
    leaves no partial file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for name, text in content.items():
            path = unfinished / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                path.chmod(0o755)
        if not target.exists():
            unfinished.chmod(0o755)  # mkdtemp lets only the user read it
            os.rename(unfinished, target)
            return
        for name in content:
            (target / name).parent.mkdir(exist_ok=True)
            os.replace(unfinished / name, target / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
