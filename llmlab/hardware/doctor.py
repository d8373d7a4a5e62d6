"""`llmlab doctor`: this machine, and which chapters run on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..base.tables import Table, Tabular
from ..base.units import show_bytes
from .scale import Scale, scale
from .tables import read_table
from .this_machine import Host, host, installed


@dataclass(frozen=True)
class Chapter:
    """Whether one chapter runs live here; `note` names the scale, or says what is missing."""

    name: str
    runs: bool
    note: str


@dataclass(frozen=True)
class Doctor(Tabular):
    """The machine, the scale at which pages run on it, and the chapters."""

    host: Host
    scale: Scale
    chapters: tuple[Chapter, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the table: a label and a value."""
        host = self.host
        rows = [("device", f"{host.name} × {host.count}" if host.count > 1 else host.name)]
        rows.append(("device memory" if host.device == "cuda" else "memory", show_bytes(host.memory)))
        if host.device == "cuda":
            rows.append(("in the GPU table", host.gpu.name if host.gpu else "no; estimates need a GPU by name"))
            capability = ".".join(map(str, host.compute_capability or ())) or "–"
            rows.append(("compute capability", capability))
            rows.append(("bf16", "yes" if host.supports_bf16 else "no: use autocast-fp16"))
            rows.append(("FlashAttention-2", "yes" if host.supports_flash_attention_2 else "no: use attention='sdpa'"))
            rows.append(("driver", host.driver or "–"))
        rows.append(("CPU", f"{host.cpu}, {host.cores} core{'s' * (host.cores != 1)}"))
        rows.append(("python", host.python))
        rows += list(host.versions.items())
        if "torch" not in host.versions:
            rows.append(("torch", "not installed: estimates work, measurements do not; pip install 'llmlab[torch]'"))
        rows.append(("scale", str(self.scale).removeprefix("scale ")))
        rows += [(f"chapter {c.name}", f"{'runs' if c.runs else 'does not run'}: {c.note}") for c in self.chapters]
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values; the GPU is given by its name."""
        host = {**asdict(self.host), "gpu": self.host.gpu.name if self.host.gpu else None}
        host["supports_bf16"] = self.host.supports_bf16
        host["supports_flash_attention_2"] = self.host.supports_flash_attention_2
        return {"host": host, "scale": asdict(self.scale), "chapters": [asdict(chapter) for chapter in self.chapters]}

    def _table(self) -> Table:
        return Table(("", ""), self.rows(), words=(0, 1))


def doctor() -> Doctor:
    """Return the properties of this machine, and whether each chapter runs on it. Same errors as `host` and `scale`."""
    chosen = scale()
    return Doctor(host(), chosen, tuple(chapter(entry, chosen) for entry in read_table("chapters.toml")["chapter"]))


def chapter(needs: dict[str, Any], chosen: Scale) -> Chapter:
    """Return whether a chapter with these needs (an entry of chapters.toml) runs at the scale `chosen`."""
    # Every chapter draws figures.
    missing = [package for package in ("matplotlib", *needs["packages"]) if not installed(package)]
    if missing:
        note = f"needs {', '.join(missing)}; pip install 'llmlab[plot,{needs['extra']}]'"
        return Chapter(needs["name"], False, note)
    if chosen.name not in needs["scales"]:
        return Chapter(needs["name"], False, f"needs the scale {' or '.join(needs['scales'])}: a bigger GPU, or Colab")
    return Chapter(needs["name"], True, f"at the scale {chosen.name}, {chosen.precision} on {chosen.device}")
