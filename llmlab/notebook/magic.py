"""The Jupyter magic `%%simulate A100-40GB`: the cell runs on a simulated GPU, and what it took stands under it."""

from __future__ import annotations

import shlex
from typing import Any

from ..base.errors import NotAvailable, SpecError, UnknownName
from ..hardware.gpu import gpu as find_gpu

USAGE = "%%simulate GPU, as `llmlab gpus` names it, or %%simulate GPU WORLD_SIZE"


def load(shell: Any) -> None:
    """Add the magic to `shell`: `%load_ext llmlab`."""

    def simulate(line: str, cell: str) -> None:
        """%%simulate GPU [WORLD_SIZE]: run the cell on a simulated GPU; names it binds to tensors stay simulated."""
        try:
            _simulate(shell, shlex.split(line), cell)
        except (SpecError, UnknownName, NotAvailable) as error:
            print(f"simulate: {error}")

    shell.register_magic_function(simulate, "cell")


def _simulate(shell: Any, words: list[str], cell: str) -> None:
    from IPython.display import display

    from ..scripts.watch import RAN_OUT_OF_MEMORY, Conditions, is_out_of_memory, watched

    name, ranks = (*words, "1")[:2] if words else ("", "1")
    if not name or len(words) > 2 or not ranks.isdigit():
        raise SpecError(f"{' '.join(words)!r}: give {USAGE}")
    with watched(Conditions(find_gpu(name), int(ranks))) as watch:
        result = shell.run_cell(cell)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            if not is_out_of_memory(error):
                return  # IPython has shown it
            watch.ended = RAN_OUT_OF_MEMORY
        report = watch.report("this cell")
    display(report)
    if watch.sim.timeline:
        display(watch.sim.timeline.plot())
