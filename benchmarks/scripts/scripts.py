"""Other people's training scripts, each as its users start it, under `llmlab run`: which run, and what they take.

    python -m benchmarks.scripts.standins --clones DIR --work DIR   # once: the data, configs and tokenizers they need
    python -m benchmarks.scripts.scripts --clones DIR --work DIR    # writes scripts.json and scripts.md
    python -m benchmarks.scripts.scripts --clones DIR --work DIR nanogpt_char hf_run_clm  # these alone

`scripts.toml` lists the scripts. DIR of --clones holds the repositories, each under the name that scripts.toml has for
it. Nothing in a repository is changed: no line of a script, and what a script writes is thrown away.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.provenance import provenance, titled_table, write
from llmlab.archive.store import write_whole
from llmlab.base.errors import SCRIPT_FAILED
from llmlab.base.units import show_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
OURS = HERE.parents[1]  # the package that runs here, also where another one is installed
LIMIT = 300  # seconds for one script
IDLE = 20  # seconds: one that took no CPU time for so long hangs
RAN, ENDED, NO_ROOM = "ran", "ran to its end", "out of memory"
REFUSED, OWN, NO_HOST, TOO_LONG, RAW, HANG, MISSING = (
    "not supported", "script error", "host out of memory", "too long", "raw traceback", "hang", "not there",
)  # fmt: skip
OUTCOMES = (RAN, ENDED, NO_ROOM, REFUSED, OWN, NO_HOST, TOO_LONG, RAW, HANG, MISSING)
ANSWERED = (RAN, ENDED, NO_ROOM)
SHOWN = 70  # characters of a command line; scripts.json has all
UPPER = "upper"  # how tables label sizes that are above the real ones
RAN_EAGER = "ran-eager"  # the code of the note that says so


@dataclass(frozen=True)
class Case:
    """A script of others: `run` is its command line, started in the folder `place` of the clones.

    `data` has the files that stand in for data sets, by their names. `path` is a folder of the clones that PYTHONPATH
    gets, `libraries` one of --work with other versions than those installed. `own` is a part of the error with which
    the script ends on a real GPU too. `published`: GiB, of the quantity that `published_is` names, from `source`.
    `about` stands in the table in place of a command line that is too long to tell from others.
    """

    name: str
    place: str
    run: str
    gpu: str = "A100-80GB"
    data: dict[str, str] = field(default_factory=dict)
    steps: int = 2
    path: str = ""
    libraries: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    limit: int = LIMIT
    own: str = ""
    published: float | None = None
    published_is: str = ""
    source: str = ""
    about: str = ""


@dataclass(frozen=True)
class Result:
    """What became of a case; sizes in bytes."""

    name: str
    repository: str
    command: str
    gpu: str
    outcome: str
    seconds: float
    steps: int = 0
    ranks: int = 1
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    upper: bool = False
    published: float | None = None
    published_is: str = ""
    source: str = ""
    about: str = ""
    said: str = ""  # the last line of what it said, where it did not run
    made: str = ""  # by what, where and when


def read_cases(path: Path) -> dict[str, Case]:
    """Return the cases of a table, by name."""
    table = tomllib.loads(path.read_text("utf-8"))
    return {name: Case(name=name, place=rows.pop("in"), **rows) for name, rows in table.items()}


def run_case(case: Case, clones: Path, work: Path, made: str = "") -> Result:
    """Run one case in a process of its own; `made` is kept with its result."""
    filled = {"clones": str(clones), "data": str(work / "data"), "tokenizer": str(work / "tokenizer")}
    words = [word.format(**filled) if "{" in word else word for word in shlex.split(case.run)]
    folder = clones / case.place
    line = [sys.executable, "-m", "llmlab", "run", "--json", "--gpu", case.gpu, "--steps", str(case.steps)]
    line += [word for name, file in case.data.items() for word in ("--data", f"{name}={work / 'data' / file}")]
    line += words
    row: dict[str, Any] = {
        "name": case.name,
        "repository": case.place.split("/")[0],
        "command": case.run,
        "gpu": case.gpu,
        "published": case.published,
        "published_is": case.published_is,
        "source": case.source,
        "about": case.about,
        "made": made,
    }
    if not folder.is_dir():
        return Result(**row, outcome=MISSING, seconds=0, said=f"{case.place} is not among the clones")
    environment = _environment(case, clones, work, filled)
    began = time.monotonic()
    with (work / "logs" / f"{case.name}.err").open("w") as errors:
        ran = _Limited(line, folder, environment, errors, case.limit)
    seconds = round(time.monotonic() - began, 1)
    said = (work / "logs" / f"{case.name}.err").read_text("utf-8", "replace")
    (work / "logs" / f"{case.name}.out").write_text(ran.output)
    found = classified(case, ran.code, ran.stopped, ran.output, said)
    return Result(**row, seconds=seconds, **found | {"said": anywhere(found["said"], clones, work)})


def anywhere(said: str, *folders: Path) -> str:
    """Return `said` with paths from the library's or the repository's folder on, as they are on any machine."""
    said = re.sub(r"/[^\s'\"]*/(site-packages|dist-packages)/", "", said)
    for folder in folders:
        said = said.replace(f"{folder}/", "")
    return said


def classified(case: Case, code: int, stopped: str, output: str, said: str) -> dict[str, Any]:
    """Return the outcome of a run, with its sizes where there are any.

    `code` is the exit code; `stopped` is empty, or why the run was stopped; `output` is what it printed, the answer
    last; `said` is its stderr.
    """
    lines = [line for line in said.splitlines() if line.strip()] or [""]
    last = next((line for line in reversed(lines) if line.startswith("llmlab: ")), lines[-1])
    answer = _answer(output)
    if answer is None and stopped:
        return {"outcome": stopped, "said": last if last.startswith("llmlab: ") else ""}
    if answer is None and code == -signal.SIGKILL:  # nobody here sent it: Linux ends what asks for too much
        return {"outcome": NO_HOST, "said": "the script itself loads more than this machine's memory"}
    if answer is None:
        if last == f"llmlab: {SCRIPT_FAILED}":
            at = max(position for position, line in enumerate(lines) if line == last)
            error = lines[at - 1]
            known = case.own and any(case.own in line for line in lines[:at])
            return {"outcome": OWN if known else RAW, "said": error[:400]}
        refused = code == 2 and last.startswith("llmlab: ") and "Traceback (most recent call last)" not in lines[-5:]
        outcome = OWN if case.own and case.own in last else REFUSED if refused else RAW
        return {"outcome": outcome, "said": last.removeprefix("llmlab: ")[:400]}
    if stopped or answer["outcome"] == "unknown":
        outcome = TOO_LONG
    elif answer["outcome"] == "out of memory":
        outcome = NO_ROOM
    else:
        outcome = RAN if answer["ended"].startswith("was ended after") else ENDED
    return {
        "outcome": outcome,
        "steps": answer["steps"],
        "ranks": answer["world_size"],
        "peak_allocated": answer["peak_allocated"],
        "peak_reserved": answer["peak_reserved"],
        "upper": any(note["code"] == RAN_EAGER for note in answer["notes"]),
        "said": (answer["where"] or "") if outcome == NO_ROOM else "",
    }


def _answer(output: str) -> dict[str, Any] | None:
    start = output.rfind('\n{\n "command"') + 1 if not output.startswith('{\n "command"') else 0
    try:
        found = json.loads(output[start:])
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and "peak_allocated" in found else None


class _Limited:
    """A command that ran for `limit` seconds at most: its exit `code`, its `output`, and why it was `stopped`.

    At its end it is interrupted, as by Ctrl-C, and says what it took so far; one that waits, or does not answer, hangs.
    """

    def __init__(self, line: list[str], folder: Path, environment: dict[str, str], errors: Any, limit: int) -> None:
        self.stopped, self.output = "", ""
        process = subprocess.Popen(
            line, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            self.output, _ = process.communicate(timeout=max(1, limit - IDLE))
        except subprocess.TimeoutExpired:
            before = _cpu_seconds(process.pid)
            try:
                self.output, _ = process.communicate(timeout=IDLE)
            except subprocess.TimeoutExpired:
                self._end(process, waits=_cpu_seconds(process.pid) - before < 1)
        self.code = process.returncode

    def _end(self, process: subprocess.Popen, waits: bool) -> None:
        self.stopped = HANG if waits else TOO_LONG
        for _ in range(3):  # Python drops a signal that arrives in a callback of a weak reference
            process.send_signal(signal.SIGINT)
            try:
                self.output, _ = process.communicate(timeout=IDLE)
                return
            except subprocess.TimeoutExpired:
                continue
        self.stopped = HANG
        os.killpg(process.pid, signal.SIGKILL)
        self.output, _ = process.communicate()


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its children; of Linux."""
    try:
        said = subprocess.run(["ps", "-o", "cputimes=", "--pid", str(pid), "--ppid", str(pid)], capture_output=True,
                              text=True, check=False).stdout  # fmt: skip
    except OSError:
        return 0.0
    return sum(float(each) for each in said.split())


def _environment(case: Case, clones: Path, work: Path, filled: dict[str, str]) -> dict[str, str]:
    path = [str(OURS), *([str(clones / case.path)] if case.path else [])]
    path += [str(work / "libraries" / name / "site-packages") for name in (case.libraries, "common") if name]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",  # not the folder, which may hold a package of the same name as a library
        "HF_HOME": str(work / "huggingface"),
        "TIKTOKEN_CACHE_DIR": str(work / "tiktoken"),
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "COLUMNS": "200",
        **{name: value.format(**filled) for name, value in case.environment.items()},
    }


def report(results: list[Result]) -> str:
    """Return what the page of the book shows, as Markdown: a count, what ran, what the others said, and by what they
    were made, for each part that ran on its own."""
    counted = {outcome: sum(result.outcome == outcome for result in results) for outcome in OUTCOMES}
    several = {ENDED: "ran to their end", OWN: "script errors"}
    counts = ", ".join(
        f"{number} {several.get(outcome, outcome) if number > 1 else outcome}"
        for outcome, number in counted.items() if number
    )  # fmt: skip
    # torchtitan-v0.2.2 and torchtitan-2024-12 are two versions of one repository
    repositories = len({re.sub(r"-v?\d.*", "", result.repository) for result in results})
    answered = [result for result in results if result.outcome in ANSWERED]
    others = [result for result in results if result.outcome not in ANSWERED]
    minutes = sum(result.seconds for result in results) / 60
    lines = [f"We ran {len(results)} command lines from {repositories} repositories in {minutes:.0f} minutes, with "
             f"these outcomes: {counts}.", ""]
    off = [abs(each) for result in answered if (each := _off(result)) is not None]
    if off:
        lines += [f"The authors of {len(off)} of them published the memory. The simulation is off by {median(off):.1%} "
                  f"at the median and by {max(off):.1%} at most.", ""]  # fmt: skip
    header = ["script", "GPU", "outcome", "peak allocated", "peak reserved", "published", "seconds"]
    lines += titled_table("Scripts that ran", header, [_ran(result) for result in answered])
    if others:
        header = ["script", "outcome", "message"]
        messages = [[_named(r), r.outcome, _plain(r.said)] for r in others]
        lines += titled_table("Scripts that did not run", header, messages, words=True)
    parts = Counter(result.made for result in results)
    if len(parts) == 1:
        return "\n".join([*lines, *parts])
    return "\n".join([*lines, *(f"- {number} command lines: {made}" for made, number in parts.items())])


def _ran(result: Result) -> list[str]:
    upper = f", {UPPER}" if result.upper else ""
    card = result.gpu if result.ranks == 1 else f"{result.ranks} × {result.gpu}"
    steps = f", {result.steps} step{'s' if result.steps != 1 else ''}"
    off = _off(result)
    published = "" if off is None else f"{result.published:.2f} GiB {result.published_is} ({off:+.1%})"
    return [
        _named(result), card, result.outcome + steps, show_bytes(result.peak_allocated) + upper,
        show_bytes(result.peak_reserved) + upper, published, f"{result.seconds:.0f}",
    ]  # fmt: skip


def _off(result: Result) -> float | None:
    """By what part of the published figure the simulated one is off."""
    size = result.peak_reserved if result.published_is == "reserved" else result.peak_allocated
    return None if result.published is None or size is None else size / 2**30 / result.published - 1


def _named(result: Result) -> str:
    return f"{result.repository}: " + (result.about or f"`{_short(result.command, SHOWN)}`")


def _plain(said: str) -> str:
    """What was said, as Markdown: __init__ is no bold word."""
    return _short(said, 300).replace("__", r"\_\_")


def _short(text: str, most: int) -> str:
    text = text.replace("`", "'").replace("\n", " ")
    return text if len(text) <= most else text[: most - 1] + "…"


@click.command()
@click.option("--clones", envvar="CLONES", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--work", envvar="WORK", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--cases", type=click.Path(path_type=Path, exists=True), default=HERE / "scripts.toml")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=HERE.parent / "results")
@click.argument("names", nargs=-1)
def main(clones: Path, work: Path, cases: Path, out: Path, names: tuple[str, ...]) -> None:
    """Run the cases, all of them or NAMES, one after the other."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in a shell's background, where scripts inherit it
    clones, work = clones.resolve(), work.resolve()
    (work / "logs").mkdir(exist_ok=True)
    table = read_cases(cases)
    stored = out / "scripts.json"
    rows = json.loads(stored.read_text("utf-8"))["scripts"] if stored.exists() else []
    known = {row["name"]: Result(**row) for row in rows}  # those that do not run again stay as they are
    made = provenance("llmlab", "torch", "transformers", "accelerate", "peft", "trl", "datasets")
    for name in names or table:
        done = run_case(table[name], clones, work, made)
        known[name] = done
        print(f"{name}: {done.outcome}, {done.steps} steps, {show_bytes(done.peak_allocated)} / "
              f"{show_bytes(done.peak_reserved)}, {done.seconds} s {done.said[:300]}", flush=True)  # fmt: skip
        results = [known[each] for each in table if each in known]
        write_whole(stored, json.dumps({"scripts": [asdict(each) for each in results]}, indent=1) + "\n")
    write(out / "scripts.md", report(results))


if __name__ == "__main__":
    main()
