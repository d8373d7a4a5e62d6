"""Kill the capstone's run at random moments, start it again each time, and compare it with an uninterrupted run.

    python -m llmlab.course.kills --kills 100

Each life of the run is a child of this process. It is forked after torch is imported, because an import takes seconds.
A process cannot catch SIGKILL, so the child cleans up nothing, as if the machine had lost its power.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..base.errors import NotAvailable
from ..data import corpus
from .capstone import SCALES, Scale, Session, prepare, run
from .quantize.formats import gguf_model  # noqa: F401  # imported once, not in each child

PIECE = slice(320_000, 360_000)  # of the documentation: short, and with enough functions to ask about


def live(folder: Path, scale: Scale, source: str) -> None:
    """Run the remaining steps, and append each one to the file `steps`, which survives a kill."""
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    notes = os.open(folder / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(notes, b"life\n")

    def note(phase: str, step: int, loss: float) -> None:
        os.write(notes, f"{phase} {step}\n".encode())

    run(scale, Session(folder, on_step=note), source)


def child(folder: Path, scale: Scale, source: str) -> int:
    """Fork a process that runs the script in `folder`; return its process id."""
    torch.optim.AdamW([torch.zeros(1)])  # runs AdamW's imports here, so that no child repeats them
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        live(folder, scale, source)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def lives(folder: Path, scale: Scale) -> list[tuple[int, int]]:
    """Return the first and the last step of each life. The steps of LoRA continue the count of pretraining."""
    spans: list[tuple[int, int]] = []
    for life in (folder / "steps").read_text().split("life\n")[1:]:
        steps = [(scale.steps if line.startswith("tune") else 0) + int(line.split()[1]) for line in life.splitlines()]
        if steps:
            spans.append((steps[0], steps[-1]))
    return spans


def repeated(spans: list[tuple[int, int]]) -> list[int]:
    """Return how many steps each life after the first repeated."""
    return [max(0, before - first + 1) for (_, before), (first, _) in pairwise(spans)]


def results(folder: Path) -> tuple[str, dict[str, dict[str, torch.Tensor]]]:
    """Return the report of a finished run, and the weights after each phase."""
    phases = {name: torch.load(folder / f"{name}.checkpoint", weights_only=True) for name in ("pretrain", "tune")}
    return (folder / "report.json").read_text(), {name: state["weights"] for name, state in phases.items()}


def same(folder: Path, reference: Path) -> bool:
    """Return whether two finished runs have the same report, and the same weights bit for bit."""
    (report, weights), (expected, expected_weights) = results(folder), results(reference)
    return report == expected and all(
        torch.equal(weights[phase][name], weight) for phase in expected_weights
        for name, weight in expected_weights[phase].items()
    )  # fmt: skip


def interrupted(kills: int, work: Path, scale: Scale, seed: int = 0) -> dict[str, Any]:
    """Kill `kills` times, at moments that are uniformly random within the length of a whole run.

    A run that finishes between two kills is compared with the uninterrupted run, and the next one starts from the
    beginning. Raises NotAvailable on Windows, and RuntimeError if a run fails to start again.
    """
    if not hasattr(os, "fork"):
        raise NotAvailable("killing forked processes needs os.fork, which only Linux and macOS have")
    chance, source = random.Random(seed), str(work / "text.txt")
    (work / "text.txt").write_text(corpus()[PIECE], encoding="utf-8")
    prepare(scale, Session(work), source)  # every child finds the tokenizer in memory
    expected = work / "uninterrupted"
    expected.mkdir()
    began = time.perf_counter()
    _, status = os.waitpid(child(expected, scale, source), 0)
    length = time.perf_counter() - began
    if status:
        raise RuntimeError(f"the run that nobody killed ended with status {status}")
    killed, finished, lost, equal, longest = 0, 0, list[int](), True, list[tuple[int, int]]()
    while killed < kills or not finished:
        folder = work / f"run-{finished}"
        folder.mkdir(exist_ok=True)
        pid = child(folder, scale, source)
        deadline = time.perf_counter() + chance.uniform(0, length) if killed < kills else float("inf")
        ended, status = 0, 0
        while not ended and time.perf_counter() < deadline:
            time.sleep(0.002)
            ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            killed += 1
            continue
        if status:
            raise RuntimeError(f"a run that was killed before did not start again: status {status}")
        equal, finished = equal and same(folder, expected), finished + 1
        spans = lives(folder, scale)
        lost, longest = lost + repeated(spans), max(longest, spans, key=len)
    return {
        "kills": killed, "finished runs": finished, "restarts": len(lost), "most steps repeated": max(lost, default=0),
        "steps between checkpoints": scale.save_every, "bit for bit": equal, "lives of a run": longest,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        print(json.dumps(interrupted(options.kills, Path(work), SCALES["test"], options.seed)))


if __name__ == "__main__":
    main()
