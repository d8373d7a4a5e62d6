"""How long an estimate, `import llmlab` and a simulation take on this machine, beside the bars for them.

    python -m benchmarks.speed.speed                           # prints
    python -m benchmarks.speed.speed --out benchmarks/results  # and writes speed.md, which the book includes

The exit code is 1 if a bar is missed. Timings depend on the machine and the moment: no test asserts them.
"""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.provenance import provenance, table, write
from llmlab import estimate
from llmlab.base.errors import SpecError
from llmlab.base.tables import Table, show
from llmlab.hardware.gpu import GPU, gpus
from llmlab.specs.check import check, is_derived
from llmlab.specs.model import ModelSpec, model, models
from llmlab.specs.run import Inference, LoRA, Training

ROOT = Path(__file__).parents[2]
ESTIMATES = 10_000
ESTIMATES_BAR = 2.0  # seconds for all of them on two cores, in two processes
PASSES = 5  # the median of them counts
IMPORT_BAR = 0.15  # seconds more than a bare interpreter takes
# Seconds of one thread, after imports, to simulate a training step: at 2048 tokens, bf16 and AdamW.
SIMULATE_BARS = {"meta-llama/Llama-3.1-8B": 4.0, "meta-llama/Llama-3.1-70B": 12.0, "meta-llama/Llama-3.1-405B": 25.0}
SIMULATE_MEMORY_BAR = 1.5  # GB (10^9 bytes) of the process, torch and transformers included
SIMULATE = """
import json, resource, sys, time
from dataclasses import replace
import llmlab as lab
lab.simulate("gpt2", lab.Training(seq_len=64), "H200")  # imports
import transformers.models.llama.modeling_llama
card = replace(lab.gpu("H200"), memory=2**45)  # no card holds these models' states
run = lab.Training(seq_len=2048, precision="bf16")
cpu, wall = time.process_time(), time.perf_counter()
report = lab.simulate("{model}", run, card)
assert report.outcome == "fits"
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall, peak]))
"""
REPEATS = 15
# How fast the machine is at the moment: on shared cores that varies by a factor of three, as do all rows.
YARDSTICK = """
import time
start, total = time.process_time(), 0
for i in range(10_000_000):
    total += i
print(time.process_time() - start)
"""
FIRST_USE = "import llmlab; llmlab.model('gpt2'), llmlab.gpu('T4')"
HEADER = ["quantity", "measured", "limit", ""]

RUNS = (
    Training(micro_batch=1, seq_len=512, precision="autocast-fp16", attention="eager"),
    Training(micro_batch=4, seq_len=1024, precision="fp32", optimizer="sgd"),
    Training(micro_batch=2, seq_len=1024, precision="mixed-fp16", checkpointing="full", zero=3, dp=8),
    Training(micro_batch=2, seq_len=1024, precision="mixed-fp16", checkpointing="selective", tp=2, zero=1, dp=4),
    Training(micro_batch=1, seq_len=1024, precision="fp16", checkpointing="full", lora=LoRA(16), quantization="nf4"),
    Inference(batch=8, prompt_len=512, new_tokens=128, weights="fp16", kv="fp16"),
)


def cases(count: int) -> list[tuple[ModelSpec, Training | Inference, GPU]]:
    """Return `count` mixes of preset, run and card, without those that `check` refuses: of more so many at equal
    distances, of fewer all in a cycle."""
    specs = [spec for spec in map(model, models()) if not is_derived(spec, RUNS[0])]
    mixes = []
    for spec, run, card in itertools.product(specs, RUNS, gpus()):
        try:
            check(spec, run, card)
        except SpecError:
            continue
        mixes.append((spec, run, card))
    if len(mixes) > count:
        return [mixes[i * len(mixes) // count] for i in range(count)]
    return list(itertools.islice(itertools.cycle(mixes), count))


def estimate_seconds(count: int, by_name: bool = False, repeats: int = PASSES) -> list[float]:
    """Return the CPU seconds that `count` mixed estimates take in this process, given specs or names, pass by pass: in
    the first one tables are read, and whatever is asked for again is worked out."""
    asked = [(spec.name, run, card.name) if by_name else (spec, run, card) for spec, run, card in cases(count)]
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for spec, run, card in asked:
            estimate(spec, run, card)
        times.append(time.process_time() - start)
    return times


def _half(which: int) -> float:
    """Return the CPU seconds that every second one of the mixed estimates takes, from the first or the second on."""
    asked = cases(ESTIMATES)[which::2]
    start = time.process_time()
    for spec, run, card in asked:
        estimate(spec, run, card)
    return time.process_time() - start


def two_cores_seconds(repeats: int = PASSES) -> float:
    """Return the median seconds of ESTIMATES on two cores: of the busier of two processes, in CPU time, since other
    programs may use the machine."""
    with ProcessPoolExecutor(2) as pool:
        return median(max(pool.map(_half, (0, 1))) for _ in range(repeats))


def interpreter_seconds(statements: list[str], repeats: int = REPEATS) -> list[float]:
    """Return the median CPU seconds of a new interpreter for each statement; the statements take turns."""
    times: dict[str, list[float]] = {statement: [] for statement in statements}
    for turn in range(repeats + 1):
        for statement in statements:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", statement], cwd=ROOT, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if turn:  # the first one compiles to bytecode
                times[statement].append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return [median(taken) for taken in times.values()]


def pace(repeats: int = 5) -> float:
    """Return the median CPU seconds of a new interpreter for ten million additions."""
    command = [sys.executable, "-c", YARDSTICK]
    return median(
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(repeats)
    )


def import_breakdown(statement: str, largest: int = 5) -> list[tuple[str, float]]:
    """Return the modules that `statement` takes longest to import, with their own ms (python -X importtime)."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = []
    for line in ran.stderr.splitlines():
        own, _, name = line.removeprefix("import time:").split("|") if line.count("|") == 2 else ("", "", "")
        if own.strip().isdigit():
            found.append((name.strip(), int(own) / 1e3))
    start = [name for name, _ in found].index("site") + 1  # before it: what a bare interpreter imports
    return sorted(found[start:], key=lambda item: -item[1])[:largest]


def torch_is_imported(statement: str) -> bool:
    """Return whether `statement`, in a new interpreter, imports torch."""
    code = f"{statement}\nimport sys\nprint('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return ran.stdout.strip() == "True"


def simulate_cost(name: str) -> tuple[float, float, int]:
    """Return the CPU seconds, wall seconds and peak bytes of a process that simulates a training step of `name`."""
    code = SIMULATE.format(model=name)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    cpu, wall, peak = json.loads(ran.stdout.splitlines()[-1])
    return cpu, wall, peak


def simulate_rows() -> list[Row]:
    """Return the rows of the simulations; the bar is for CPU seconds, since other programs may use the machine."""
    rows = []
    for name, bar in SIMULATE_BARS.items():
        cpu, wall, peak = simulate_cost(name)
        what = f"simulate a step of {name.rpartition('/')[2]}"
        rows.append(Row(f"{what}, CPU time ({wall:.1f} s wall)", f"{cpu:.1f} s", f"< {bar:g} s", cpu < bar))
        within = peak < SIMULATE_MEMORY_BAR * 1e9
        rows.append(Row(f"{what}, RAM", f"{peak / 1e9:.2f} GB", f"< {SIMULATE_MEMORY_BAR:g} GB", within))
    return rows


@dataclass(frozen=True)
class Row:
    """A line of the table: what was measured, the figure, the bar, and whether it was met (None: there is no bar)."""

    what: str
    measured: str
    bar: str = ""
    within: bool | None = None

    def cells(self) -> list[str]:
        return [self.what, self.measured, self.bar, "" if self.within is None else "met" if self.within else "MISSED"]


def measure_all() -> list[Row]:
    """Return every row of the table, measured now."""
    first, *later = estimate_seconds(ESTIMATES, repeats=1 + PASSES)
    seconds = median(later)
    shared, by_name = two_cores_seconds(), median(estimate_seconds(ESTIMATES, by_name=True))
    bare, imported, used = interpreter_seconds(["pass", "import llmlab", FIRST_USE])
    torch_free = not torch_is_imported(FIRST_USE)
    mixes = len(set(cases(ESTIMATES)))
    extra = imported - bare
    return [
        Row("ten million additions in a Python loop, as a measure of this machine", f"{pace():.2f} s"),
        Row(f"{ESTIMATES:,} estimates ({mixes:,} different) on two cores, CPU time of the busier one",
            f"{shared:.2f} s",
            f"< {ESTIMATES_BAR:g} s", shared < ESTIMATES_BAR),
        Row(f"{ESTIMATES:,} estimates in one process, median of {PASSES} passes", f"{seconds:.2f} s"),
        Row("the first pass, which also reads the tables", f"{first:.2f} s"),
        Row(f"{ESTIMATES:,} estimates, with model and GPU given by name", f"{by_name:.2f} s"),
        Row("one estimate, with model and GPU given as objects", f"{seconds / ESTIMATES * 1e6:.0f} µs"),
        Row(f"starting Python, median of {REPEATS}", f"{bare * 1e3:.0f} ms"),
        Row("import llmlab, in addition to starting Python", f"{extra * 1e3:.0f} ms", f"< {IMPORT_BAR * 1e3:.0f} ms",
            extra < IMPORT_BAR),
        Row("starting Python and importing llmlab, relative to starting Python", f"{imported / bare:.2f}×"),
        Row("import llmlab and load a model and a GPU, in addition to starting Python",
            f"{(used - bare) * 1e3:.0f} ms"),
        Row("PyTorch is not imported", "yes" if torch_free else "no", "yes", torch_free),
        *simulate_rows(),
    ]  # fmt: skip


def to_markdown(rows: list[Row], made: str) -> str:
    """Return the table, and under it the line that says what made it."""
    return "\n".join([*table(HEADER, [row.cells() for row in rows]), "", made])


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write speed.md to.")
def main(out: Path | None) -> None:
    """Time 10,000 estimates, `import llmlab` and three simulations; exit 1 where a bar is missed."""
    rows = measure_all()
    show(Table(HEADER, [row.cells() for row in rows], f"Speed, Python {sys.version.split()[0]}"))
    slowest = ", ".join(f"{name} {ms:.1f} ms" for name, ms in import_breakdown(FIRST_USE))
    print(f"Slowest to import for a model and a card: {slowest}")
    if out:
        write(out / "speed.md", to_markdown(rows, provenance("llmlab", "torch", "transformers")))
    raise SystemExit(any(row.within is False for row in rows))


if __name__ == "__main__":
    main()
