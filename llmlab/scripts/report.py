"""The result of `llmlab run`: the memory and time of one script on the simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..base.notes import Note, notes_to_json
from ..base.tables import Table, Tabular
from ..base.terms import PARTS, PHASES, Outcome
from ..base.units import MiB, show_bytes, show_seconds

SHOWN_MODULES = 8  # rows of the printed table; --json has all
SHOWN_LINES = 3


@dataclass(frozen=True, kw_only=True, repr=False)
class ScriptReport(Tabular):
    """The memory and time of a script on a GPU over its whole run; all sizes are bytes.

    `process` is the memory that the driver would show: reserved bytes, CUDA context and NCCL's buffers; None if these
    are not known. The script fits if this is within `capacity`, the GPU's memory, and within `limit` if one was given.
    `needed` is the memory that a run that did not fit would have used with enough room. `steps` counts updates of the
    weights; the steps of several optimizers can be one update. `step_seconds` is the median over the updates after the
    first, without communication between ranks; None if a kernel's time is not known. `step_seconds_low` to
    `step_seconds_high` is its 80 % interval, None with several ranks. `phases` has the peak of each phase, `growth` the
    bytes that the last step left behind, by module and line. `host_peak` is the most bytes of this rank's simulated
    tensors in the host's memory (weights before they move, offloaded states, copies from the GPU), of which
    `host_pinned` are pinned; `host_lines` divides it by line of code. Python, libraries and data sets need more.
    """

    command: str
    gpu: str
    capacity: int
    world_size: int = 1
    rank: int = 0
    steps: int = 0
    ended: str = "ran to its end"
    outcome: Outcome = "unknown"
    where: str | None = None  # on "out of memory": the operator and its module, and by how much
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    process: int | None = None
    limit: int | None = None
    needed: int | None = None
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    phases: Mapping[str, int] = field(default_factory=dict)
    host_peak: int | None = None
    host_pinned: int | None = None
    host_lines: Mapping[str, int] = field(default_factory=dict)
    growth: Mapping[str, int] = field(default_factory=dict)
    by_category: Mapping[str, int] = field(default_factory=dict)
    by_module: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    def to_json(self) -> str:
        """Return the report as JSON text; unknown values are null."""
        return json.dumps({**asdict(self), "notes": notes_to_json(self.notes)}, indent=1)

    def _table(self) -> Table:
        rows = [(part, show_bytes(self.by_category[part])) for part in PARTS if part in self.by_category]
        rows.append(("peak allocated", show_bytes(self.peak_allocated)))
        if self.peak_reserved is not None:
            rows.append(("peak reserved", show_bytes(self.peak_reserved)))
        if self.process is not None:
            rows.append(("process, with CUDA context", show_bytes(self.process)))
        if self.needed is not None:
            rows.append(("memory needed", show_bytes(self.needed)))
        rows.append(("memory of the device", show_bytes(self.capacity)))
        if self.limit is not None:
            rows.append(("limit", show_bytes(self.limit)))
        largest = sorted(self.by_module.items(), key=lambda item: -sum(item[1].values()))[:SHOWN_MODULES]
        rows += [(f"of the peak, in {module}", show_bytes(sum(sizes.values()))) for module, sizes in largest]
        growing = [(place, size) for place, size in self.growth.items() if size >= MiB][:SHOWN_MODULES]
        rows += [(f"grows per step, in {place}", show_bytes(size)) for place, size in growing]
        if (self.host_peak or 0) >= MiB:
            of = " (one rank)" if self.world_size > 1 else ""
            rows.append((f"peak of tensors in the host's memory{of}", show_bytes(self.host_peak)))
            rows += [("  pinned", show_bytes(self.host_pinned))] if self.host_pinned else []
            rows += [(f"  created by {line}", show_bytes(size))
                     for line, size in [*self.host_lines.items()][:SHOWN_LINES]]  # fmt: skip
        rows += [(f"peak during {PHASES[phase]}", show_bytes(size)) for phase, size in self.phases.items()]
        if self.step_seconds is not None:
            rows.append(("time per step", show_seconds(self.step_seconds)))
        if self.step_seconds_low is not None and self.step_seconds_high is not None:
            between = f"{show_seconds(self.step_seconds_low)} to {show_seconds(self.step_seconds_high)}"
            rows.append(("  80 % interval", between))
        rows.append(("optimizer steps", str(self.steps)))
        exceeded = self.outcome == "out of memory" and self.where is None
        limit = f"the limit of {show_bytes(self.limit)}" if self.limit is not None else "the GPU has"
        rows.append(("outcome", self.outcome + (f": more than {limit}" if exceeded else "")))
        ranks = f", rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        at = f": {self.where}" if self.where else ""
        title = f"{self.command} on {self.gpu}{ranks}, simulated"
        numbered = ["* stands for the numbers of modules in a list."] if any("*" in path for path, _ in largest) else []
        return Table(("", ""), rows, title, "\n".join([f"The script {self.ended}{at}.", *numbered, *self.notes]))

    def __repr__(self) -> str:
        return f"<{self.command} on {self.gpu}: peak {show_bytes(self.peak_allocated)}, {self.outcome}>"
