"""The pytest fixture `simulated_gpu`, for tests that fail when training no longer fits on a GPU.

    def test_fits(simulated_gpu):
        with simulated_gpu("A100-40GB", max_gib=38):
            train()

`pytest --update-memory` stores the memory of passing tests next to their file, as NAME.memory.json. A test that fails
later names the modules that have grown since. torch is imported by the first test that uses the fixture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..base.files import write_whole
from ..base.units import GiB, show_bytes
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu

if TYPE_CHECKING:
    from ..simulation.simulator import Simulator
    from .report import ScriptReport

GROWN = 5  # modules that a failure names


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-memory."""
    words = "Store what tests with simulated_gpu take, beside their files, as NAME.memory.json."
    parser.getgroup("llmlab").addoption("--update-memory", action="store_true", help=words)


@pytest.fixture
def simulated_gpu(request: pytest.FixtureRequest) -> Callable[..., AbstractContextManager[Simulator]]:
    """Return `simulated_gpu(gpu, max_gib=None, world_size=None, assume=None)`: a context manager that simulates that
    GPU.

    The test fails if the code in the block runs out of GPU memory, or if the process would use more than `max_gib`
    (in units of 2^30 bytes, with the CUDA context).
    """
    from .watch import RAN_OUT_OF_MEMORY, Conditions, is_out_of_memory, watched

    stored = _Stored(request)

    @contextmanager
    def simulated(
        gpu: GPU | str, max_gib: float | None = None, world_size: int | None = None, assume: float | None = None
    ) -> Iterator[Simulator]:
        limit = None if max_gib is None else round(max_gib * GiB)
        with watched(Conditions(find_gpu(gpu), world_size, limit=limit, assume=assume)) as watch:
            try:
                yield watch.sim
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                watch.ended = RAN_OUT_OF_MEMORY
            report = watch.report(request.node.name)
        if report.outcome == "fits":
            stored.keep(report)
        else:
            raise pytest.fail.Exception(stored.explain(report), pytrace=False) from None

    return simulated


class _Stored:
    """The stored memory of the tests of one file, in bytes by test and module."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.path = Path(request.path).with_suffix(".memory.json")
        self.updating = request.config.getoption("--update-memory")

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text("utf-8")) if self.path.exists() else {}

    def keep(self, report: ScriptReport) -> None:
        if self.updating:
            sizes = {module: sum(parts.values()) for module, parts in report.by_module.items()}
            memory = {"peak_allocated": report.peak_allocated, "peak_reserved": report.peak_reserved, "modules": sizes}
            tests = {**self._read(), report.command: memory}
            write_whole(self.path, json.dumps(tests, indent=1, sort_keys=True) + "\n")

    def explain(self, report: ScriptReport) -> str:
        """Return the message of a failing test: its memory, the limit, and the modules that have grown, or the
        largest ones if nothing was stored."""
        reserved, room = (report.peak_reserved or 0), report.limit or report.capacity
        head = f"{report.command} takes {show_bytes(report.process or reserved)} of {report.gpu}'s {show_bytes(room)}"
        if report.where:
            head = f"{report.command} runs out of memory on {report.gpu}: {report.where}"
        sizes = {module: sum(parts.values()) for module, parts in report.by_module.items()}
        before = self._read().get(report.command)
        if before is None:
            lines = [f"  {show_bytes(size):>12}  {module}" for module, size in _largest(sizes)]
            heading = "the peak by module (`pytest --update-memory` stores it, to compare with):"
            return "\n".join([head, heading, *lines])
        grown = {name: size - before["modules"].get(name, 0) for name, size in sizes.items()}
        lines = [f"  {'+' + show_bytes(size):>13}  {module}" for module, size in _largest(grown) if size > 0]
        return "\n".join([head, f"what has grown since {self.path.name} was stored:", *(lines or ["  no module"])])


def _largest(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda item: -item[1])[:GROWN]
