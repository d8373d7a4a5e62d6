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
    """Whether one chapter runs live here; `note` says at which scale, or what to do so that it does."""

    name: str
    runs: bool
    note: str


@dataclass(frozen=True)
class Doctor(Tabular):
    """The machine, the scale that its pages run at, and the chapters."""

    host: Host
    scale: Scale
    chapters: tuple[Chapter, ...]

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the table: a label and a value."""
        here = self.host
        rows = [("device", f"{here.name} × {here.count}" if here.count > 1 else here.name)]
        rows.append(("device memory" if here.device == "cuda" else "memory", show_bytes(here.memory)))
        if here.device == "cuda":
            rows.append(("in the GPU table", here.gpu.name if here.gpu else "no; estimates need a GPU by name"))
            capability = ".".join(map(str, here.compute_capability or ())) or "–"
            rows.append(("compute capability", capability))
            rows.append(("bf16", "yes" if here.supports_bf16 else "no: use autocast-fp16"))
            rows.append(("FlashAttention-2", "yes" if here.supports_flash_attention_2 else "no: use attention='sdpa'"))
            rows.append(("driver", here.driver or "–"))
        rows.append(("CPU", f"{here.cpu}, {here.cores} core{'s' * (here.cores != 1)}"))
        rows.append(("python", here.python))
        rows += list(here.versions.items())
        if "torch" not in here.versions:
            rows.append(("torch", "not installed: estimates work, measurements do not; pip install 'llmlab[torch]'"))
        rows.append(("scale", str(self.scale).removeprefix("scale ")))
        rows += [(f"chapter {c.name}", f"{'runs' if c.runs else 'does not run'}: {c.note}") for c in self.chapters]
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values; the card by its name."""
        here = {**asdict(self.host), "gpu": self.host.gpu.name if self.host.gpu else None}
        here["supports_bf16"] = self.host.supports_bf16
        here["supports_flash_attention_2"] = self.host.supports_flash_attention_2
        return {"host": here, "scale": asdict(self.scale), "chapters": [asdict(chapter) for chapter in self.chapters]}

    def _table(self) -> Table:
        return Table(("", ""), self.rows(), words=(0, 1))


def doctor() -> Doctor:
    """Return what this machine has and what each chapter can run on it. Same errors as `host` and `scale`."""
    chosen = scale()
    return Doctor(host(), chosen, tuple(chapter(entry, chosen) for entry in read_table("chapters.toml")["chapter"]))


def chapter(needs: dict[str, Any], chosen: Scale) -> Chapter:
    """Return whether a chapter with these needs (an entry of chapters.toml) runs at the scale `chosen`."""
    missing = [package for package in ("matplotlib", *needs["packages"]) if not installed(package)]  # all draw
    if missing:
        note = f"needs {', '.join(missing)}; pip install 'llmlab[plot,{needs['extra']}]'"
        return Chapter(needs["name"], False, note)
    if chosen.name not in needs["scales"]:
        return Chapter(needs["name"], False, f"needs the scale {' or '.join(needs['scales'])}: a bigger GPU, or Colab")
    return Chapter(needs["name"], True, f"at the scale {chosen.name}, {chosen.precision} on {chosen.device}")
