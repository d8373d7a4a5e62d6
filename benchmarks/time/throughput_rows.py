"""Published training throughputs, as throughputs.toml has them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llmlab as lab
from llmlab.archive import PLAN, records
from llmlab.archive.published_steps import PublishedStep, foundry_scaling, megatron_iterations
from llmlab.archive.store import PACKAGE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROWS = Path(__file__).with_name("throughputs.toml")
UNSEEN = "never seen"  # the group of rows that wait for their first prediction: nothing is predicted of them before
SCALED_ASSUMED = "NDR; on 8 GPUs PyTorch's memory-efficient kernel for Triton's"


@dataclass(frozen=True)
class Row:
    """A published throughput: `measured` tokens/s per GPU of `run`, of a source in `group`.

    `held` is the run as memory has it, where one does not say both; `uncertain` why nobody can know that.
    """

    id: str
    group: str
    citation: str
    model: str | dict[str, Any]
    label: str
    run: lab.Training
    card: str
    nodes: dict[str, Any] | None  # None where the source does not say
    measured: float
    assumed: str = ""
    source: str = ""  # its name in throughputs.toml
    held: lab.Training | None = None
    uncertain: str = ""
    power: float | None = None  # W of a limit below the card's own

    @property
    def shown(self) -> str:
        run, many = self.run, self.run.world_size
        degrees = " ".join(f"{d}{getattr(run, d)}" for d in ("dp", "tp", "pp", "cp") if getattr(run, d) > 1)
        copies = f"{run.dp_replicate} copies" if run.dp_replicate > 1 else ""
        adapters = "QLoRA" if run.quantization else "LoRA" if run.lora else ""
        engine = ("FSDP" if run.stack == "transformers" else run.stack.name) if run.zero == 3 else ""
        what = (adapters, engine, degrees, copies, f"{run.micro_batch}×{run.seq_len}",
                run.checkpointing, "compiled" if run.compile else "",
                f"fp8 {run.fp8}" if run.fp8 else "")  # fmt: skip
        return f"{self.label}, {many} × {self.card}: {', '.join(filter(None, what))}"


def rows() -> list[Row]:
    """Return the published throughputs, and those that were measured here."""
    return [*published(), *measured()]


def published() -> list[Row]:
    """Return the published throughputs: llm-foundry's weak scaling after its other rows, then other sources."""
    table = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    first, *others = table["source"]
    found = [_row(first, entry, table["models"]) for entry in first["row"]]
    found += [_scaled(step, first) for step in foundry_scaling()]
    return found + [_row(source, entry, table["models"]) for source in others for entry in source["row"]]


def read(path: Path) -> list[Row]:
    """Return the rows of a file with the same fields as throughputs.toml."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return [_row(source, entry, table.get("models", {})) for source in table["source"] for entry in source["row"]]


def measured() -> list[Row]:
    """Return the steps that `llmlab record` measured for the chapter on time; a row is named by its place in the plan.

    Steps that it measured for chapters on memory are as short as their launches: they say what a host does.
    """
    found = []
    for number, item in enumerate(item for item in PLAN if item.chapter == "flops-and-time"):
        for report in records(item.model, item.run, source="measured", folder=PACKAGE):
            if isinstance(report.run, lab.Training) and report.gpu and report.tokens_per_second:
                label, date = report.model.rpartition("/")[2], report.environment["date"]
                id, source = f"{report.gpu.lower()}-{number:02}", f"llmlab-{report.gpu.lower()}"
                found.append(Row(id, "left out", f"llmlab record, {date}", report.model, label, report.run, report.gpu,
                                 None, report.tokens_per_second, source=source, held=report.run))  # fmt: skip
    return found


def iterations() -> list[Row]:
    """Return Megatron-LM's iterations with selective and with full recomputation (arXiv 2205.05198, table 5).

    Their times are in llmlab's own tables; here they are what two ways of the same training cost.
    """
    return [
        _published(step, f"megatron-{step.name.replace(' ', '-')}", f"GPT-{step.name.split()[0]}", "left out",
                   "arXiv 2205.05198, table 5")
        for step in megatron_iterations()
    ]  # fmt: skip


def _scaled(step: PublishedStep, source: dict[str, Any]) -> Row:
    label = f"MPT-{step.name.split()[0]}-{step.run.seq_len}"
    row = _published(step, f"foundry-{step.name.replace(' ', '-')}", label, source["group"],
                     f"{source['citation']}, {source['date']}")  # fmt: skip
    return replace(row, assumed=SCALED_ASSUMED)


def _published(step: PublishedStep, id: str, label: str, group: str, citation: str) -> Row:
    rate = step.run.global_batch * step.run.seq_len / step.run.world_size / step.seconds
    return Row(id, group, citation, step.config, label, step.run, step.card, {"network": step.network}, rate)


def _row(source: dict[str, Any], entry: dict[str, Any], models: dict[str, Any]) -> Row:
    adapters = lab.LoRA(**entry["lora"]) if "lora" in entry else None
    run = lab.Training(**entry["run"], lora=adapters)
    rate = entry.get("tokens_per_second")
    if rate is None:
        rate = run.global_batch * run.seq_len / run.world_size / entry["seconds"]
    name = entry["model"]
    nodes = {name: entry.get(name) for name in ("network", "adapters", "inside")}
    if nodes["network"] == "not said":
        nodes = None
    elif "gpus_per_node" in entry:
        nodes["gpus"] = entry["gpus_per_node"]
    citation = f"{source['citation']}, {source['date']}"
    label = name.rpartition("/")[2]
    memory = entry.get("memory", {})
    uncertain, fields = (memory, {}) if isinstance(memory, str) else ("", memory)
    held = lab.Training(**{**entry["run"], **fields}, lora=adapters)
    return Row(entry["id"], source["group"], citation, models.get(name, name), label, run, entry["card"], nodes, rate,
               entry.get("assumed", ""), source["name"], held, uncertain, entry.get("power"))  # fmt: skip
