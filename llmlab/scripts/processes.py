"""Processes that a script starts by multiprocessing: they run on the simulated GPU, and their peaks are recorded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import context
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from ..simulation.simulator import Simulator
from .watch import Enough

FORKS = hasattr(os, "fork")


class Processes:
    """The processes of one run: `peaks` has the peak memory, in bytes, of each process that used the GPU."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.peaks: list[int] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Fork each process, even if the script asks for "spawn", so that it has the simulated GPU."""
        real = BaseProcess.run
        with TemporaryDirectory(prefix="llmlab-processes-") as folder:

            def run(process: BaseProcess) -> None:
                import torch

                torch.set_num_threads(1)  # the threads of the parent do not exist in a forked process
                before = self.sim.peak_allocated
                try:
                    with suppress(Enough):
                        real(process)
                finally:
                    if self.sim.peak_allocated > before:
                        Path(folder, str(os.getpid())).write_text(str(self.sim.peak_allocated), "utf-8")

            with mock.patch.object(BaseProcess, "run", run), _forked():
                try:
                    yield
                finally:
                    self.peaks = [int(file.read_text("utf-8")) for file in Path(folder).iterdir()]


@contextmanager
def _forked() -> Iterator[None]:
    if not FORKS:
        yield
        return
    with (
        mock.patch.object(context.SpawnContext, "Process", context.ForkProcess),
        mock.patch.object(context.ForkServerContext, "Process", context.ForkProcess),
    ):
        yield
