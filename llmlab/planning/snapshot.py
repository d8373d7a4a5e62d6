"""The report on a memory snapshot of PyTorch: the peak by part and place, holes, growth, and two snapshots compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.tables import Table, Tabular
from ..base.terms import PARTS, PHASES
from ..base.units import show_bytes
from ..recording.snapshot import addressed, read_snapshot
from .out_of_memory import VARIABLE, OutOfMemory

SHOWN = 8  # places, and segments with holes, in the table; --json has all
# The changes that make each part smaller, by the names under which `fix` lists them.
LEVERS = {
    "weights": "ZeRO-3, LoRA, QLoRA or weights in half precision",
    "gradients": "ZeRO-2 or LoRA",
    "optimizer": "8-bit AdamW, ZeRO-1, or optimizer states in host memory",
    "activations": "checkpointing, a smaller micro-batch, or fused attention",
    "logits": "fused kernels (Liger), which never store all logits",
}


@dataclass(frozen=True, repr=False)
class SnapshotReport(Tabular):
    """The memory of one GPU in a snapshot; all sizes are bytes.

    `peak` is the highest allocated memory in the recorded history, reached in `phase`. `parts` and `places` (modules or
    lines of code) each divide it, and `detail` divides the part "other". The other sizes are from the moment when the
    file was written: `holes` maps each partly used segment to its free bytes, `largest_free` is the largest free block,
    `unused_segments` is the size of segments without a block in use, and `rounding` was added to requests.
    `growth` is the memory that the last step left behind, by place. `failure` is the last request in the history that
    failed. `other` is the snapshot to compare with.
    """

    name: str
    device: int
    allocated: int
    reserved: int
    peak: int
    phase: str | None
    events: int
    steps: int
    parts: Mapping[str, int]
    detail: Mapping[str, int]
    places: Mapping[str, int]
    holes: Mapping[str, int]
    largest_free: int
    unused_segments: int
    rounding: int
    growth: Mapping[str, int]
    failure: OutOfMemory | None = None
    devices: tuple[int, ...] = (0,)
    other: SnapshotReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values, sizes in bytes."""
        nested = {"failure": self.failure and self.failure.to_dict(), "other": self.other and self.other.to_dict()}
        return {**asdict(self), **nested, "advice": self.advice}

    @property
    def advice(self) -> list[str]:
        """Sentences about the snapshot's history, holes and growth, and what would help."""
        sentences = [] if self.events else [
            "The file has no history, so the peak is the memory at the moment when it was written. Call "
            "torch.cuda.memory._record_memory_history() before the run to record one."
        ]  # fmt: skip
        if len(self.devices) > 1:
            sentences.append(f"The file has GPUs {', '.join(map(str, self.devices))}; this is the one with the most.")
        if self.failure:
            sentences.append(f"The history ends in an out-of-memory error. {self.failure.advice}")
        holes = sum(self.holes.values())
        if 10 * holes > self.reserved:
            sentences.append(
                f"Holes are {holes / self.reserved:.0%} of the reserved memory. "
                f"{VARIABLE}=expandable_segments:True lets the allocator move free memory between requests."
            )
        if grown := sum(self.growth.values()):
            sentences.append(
                f"The last recorded step left {show_bytes(grown)} behind. A list of losses or outputs that keeps "
                "tensors is a common cause; store loss.item() or loss.detach()."
            )
        largest = max(self.parts, key=lambda part: self.parts[part], default="other")
        if largest in LEVERS and 3 * self.parts[largest] > self.peak:
            sentences.append(f"The largest part is {largest}, which these changes reduce: {LEVERS[largest]}. "
                             "`llmlab fix MODEL --gpu NAME` says by how much.")  # fmt: skip
        return sentences

    def rows(self) -> list[tuple[str, int]]:
        """Return the rows of the table: a label, and bytes."""
        during = f", during {PHASES[self.phase]}" if self.events and self.phase in PHASES else ""
        rows = [(part, self.parts[part]) for part in PARTS if part in self.parts]
        rows += [(f"  {name}", size) for name, size in self.detail.items()]
        rows += [(f"peak allocated{during}", self.peak), ("allocated at the end", self.allocated),
                 ("reserved at the end", self.reserved), ("  holes in used segments", sum(self.holes.values())),
                 ("  unused segments", self.unused_segments), ("  largest free block", self.largest_free),
                 ("  rounding of requests", self.rounding)]  # fmt: skip
        rows += [(f"of the peak, in {place}", size) for place, size in self.places.items()]
        rows += [(f"grows per step, in {place}", size) for place, size in self.growth.items()]
        return rows + [(f"hole in segment {segment}", size) for segment, size in self.holes.items()]

    def _table(self) -> Table:
        title = f"{self.name}: GPU {self.device}, {self.events:,} events in {self.steps} steps"
        if self.other:
            return self._differences(self.other)
        counts: dict[str, int] = {}
        rows = []
        for label, size in self.rows():
            kind = label.split(" in ")[0] if " in " in label else label
            counts[kind] = counts.get(kind, 0) + 1
            if size and counts[kind] <= SHOWN:
                rows.append((label, show_bytes(size)))
        return Table(("", ""), rows, title, "\n".join(self.advice))

    def _differences(self, other: SnapshotReport) -> Table:
        """Return the table of both snapshots' sizes: parts first, then the places that differ most."""
        own, other_sizes = dict(_comparable(self)), dict(_comparable(other))
        labels = list(dict.fromkeys([*own, *other_sizes]))
        differences = {label: own.get(label, 0) - other_sizes.get(label, 0) for label in labels}
        places = [label for label in labels if label.startswith(("of the peak", "grows"))]
        changed = [label for label in places if differences[label]]
        changed = sorted(changed, key=lambda label: -abs(differences[label]))[:SHOWN]
        rows = [
            (label, show_bytes(own.get(label, 0)), show_bytes(other_sizes.get(label, 0)), _signed(differences[label]))
            for label in [*(label for label in labels if label not in places), *changed]
            if own.get(label) or other_sizes.get(label)
        ]
        names = (self.name, other.name) if self.name != other.name else ("first", "second")
        title = f"{self.name} against {other.name}"
        return Table(("", *names, "difference"), rows, title, "\n".join(self.advice))

    def __repr__(self) -> str:
        return f"<SnapshotReport: {self.name}: peak {show_bytes(self.peak)}, reserved {show_bytes(self.reserved)}>"


def _comparable(report: SnapshotReport) -> list[tuple[str, int]]:
    """Return the rows that can be compared with those of another snapshot, without phases and addresses."""
    rows = [(label.split(", during")[0], size) for label, size in report.rows()]
    return [(label, size) for label, size in rows if not label.startswith("hole in segment")]


def _signed(size: int) -> str:
    return f"{'−' if size < 0 else '+'}{show_bytes(abs(size))}" if size else "0 B"


def snapshot_report(path: str | Path, against: str | Path | None = None) -> SnapshotReport:
    """Return the report on the snapshot in the file `path`, compared with the one in the file `against`, if given."""
    snapshot = read_snapshot(path)
    history = snapshot.history
    division = history.division
    places: dict[str, int] = {}
    for block in division.blocks:
        place = history.origins[block.born].place
        places[place] = places.get(place, 0) + block.size
    holes: dict[str, int] = {}
    free, unused, rounding = [0], 0, 0
    for segment in snapshot.segments:
        inactive = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        free += inactive
        if sum(inactive) == segment["total_size"]:
            unused += segment["total_size"]
        elif inactive:
            holes[f"{segment['address']:#x} of {show_bytes(segment['total_size'])}"] = sum(inactive)
        in_use = [block for _, block in addressed(segment) if block["state"] != "inactive"]
        rounding += sum(max(0, block["size"] - block.get("requested_size", block["size"])) for block in in_use)
    failure = None
    if history.failure:
        requested, device_free, allocated, reserved = history.failure
        unallocated = max(0, reserved - allocated)
        failure = OutOfMemory(requested, device_free + allocated + unallocated, device_free, allocated, unallocated)
    return SnapshotReport(
        name=Path(path).name,
        device=snapshot.device,
        allocated=snapshot.allocated,
        reserved=snapshot.reserved,
        peak=division.peak,
        phase=division.phase,
        events=len(snapshot.trace),
        steps=len(history.boundaries),
        parts=division.parts,
        detail=division.detail.get("other", {}),
        places=_largest_first(places),
        holes=_largest_first(holes),
        largest_free=max(free),
        unused_segments=unused,
        rounding=rounding,
        growth=history.growth(),
        failure=failure,
        devices=snapshot.devices,
        other=None if against is None else snapshot_report(against),
    )


def _largest_first(sizes: dict[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
