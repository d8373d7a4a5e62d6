"""The kernels of the course beside naive PyTorch, torch.compile, Liger and SDPA, with and without backward, on a GPU.

    python -m benchmarks.kernels.kernel_times                           # prints
    python -m benchmarks.kernels.kernel_times --out benchmarks/results  # and writes kernel_times.md and .json; the JSON
                                                                  # also as a record of this GPU, which the book reads
    python -m benchmarks.kernels.kernel_times --sweep [--out ...]       # our kernels alone, with other tiles, warps and
                                                                  # stages than they choose: kernel_sweep.md and .json

The implementations of a kernel ("ways") take turns, round after round, each on tensors of its own, so that clock rates
and other work on the machine affect all alike; a time is GPU time, the median of the rounds, and a ratio is the median
of the rounds' ratios. Memory is what one step allocates beyond its inputs. Before it is timed, each way must give the
results of rung 0 in fp32; one that does not, or does not run here, is named and left out. The results are written after
each kernel, so that a run that is cut short keeps them.

(Not kernels.py: transformers and bitsandbytes look for Hugging Face's package `kernels`, and would find the script.)

Exit code 0: all bars met; 1: one is missed or a way failed; 2: no CUDA GPU with Triton here, and then nothing is
measured or written.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import click
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.provenance import provenance, table, write
from llmlab.archive.store import SCHEMA, output_folder, slug, write_whole
from llmlab.base.units import GiB, MiB
from llmlab.course import kernels
from llmlab.course.kernels.ladder import attention, cross_entropy, rms_norm
from llmlab.hardware.this_machine import host

ROUNDS = 5
TIMED_MS = 100  # per way and round
FLUSH = {"large": 4 * GiB, "small": GiB // 2, "tiny": MiB}  # larger than any cache; 1 to 2 ms to write
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}  # as a share of the largest value
OURS, LIGER, SDPA, NAIVE = "llmlab", "liger", "sdpa", "naive"
SWEPT = "llmlab-sweep"  # the provider of a sweep's records; their options are the setting, none for what we choose
NAMES = {
    NAIVE: "naive", "pytorch": "better", "torch_compile": "compiled", OURS: "ours", LIGER: "Liger", SDPA: "SDPA",
}  # fmt: skip
MODES = ("forward", "full")
HEADER = ["kernel, mode", *NAMES.values(), "ours / rival", "bar", "", "memory, ours", "rival's"]
Way = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One kernel at one size: `make` returns new arguments, `ways` are the functions that are called with them."""

    kernel: str
    sizes: dict[str, int]
    make: Callable[[], tuple]
    ways: dict[str, Way]
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True)
class Setting:
    """A way of a sweep: our kernel while names of its module, `module`, stand for `instead`. `said`: the setting."""

    call: Way
    module: str = ""
    instead: dict[str, Any] = field(default_factory=dict)
    said: dict[str, int] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def held(self) -> AbstractContextManager:
        """Return the context in which forward and backward have to run."""
        return mock.patch.multiple(self.module, **self.instead) if self.instead else nullcontext()


@dataclass(frozen=True)
class Row:
    """The measurements of one case in one mode: each way's seconds in each round and bytes beyond the inputs."""

    kernel: str
    mode: str
    dtype: str
    sizes: dict[str, int]
    seconds: dict[str, list[float]]
    memory: dict[str, int]
    settings: dict[str, dict[str, int]] = field(default_factory=dict)  # by way, of a sweep


class Bar(NamedTuple):
    """Ours may take at most `most` times the rival's time."""

    rival: str
    most: float


# Ours within 10 % of Liger, the fused loss within 15 %; attention at 70 % and 60 % of SDPA-flash's throughput.
BARS = {
    **{(k, mode): Bar(LIGER, 1.10) for k in ("rms_norm", "swiglu", "rope", "cross_entropy") for mode in MODES},
    **{("linear_cross_entropy", mode): Bar(LIGER, 1.15) for mode in MODES},
    ("attention", "forward"): Bar(SDPA, 1 / 0.70),
    ("attention", "full"): Bar(SDPA, 1 / 0.60),
}
# Before Ampere SDPA has no flash attention: ours must beat the naive one.
OLD_BARS = {**BARS, **{("attention", mode): Bar(NAIVE, 1.0) for mode in MODES}}
LINEAR = 1.1  # attention's memory at twice the tokens may be this many times twice the memory


# ---------------------------------------------------------------- cases

SIZES = {  # Llama 3 8B's on a large card; fewer tokens on one with less than 40 GiB; tiny for the interpreter
    "large": {"tokens": 8192, "hidden": 4096, "inner": 14336, "heads": 32, "kv": 8, "vocab": 128256, "T": 4096, "B": 2},
    "small": {"tokens": 1024, "hidden": 4096, "inner": 14336, "heads": 32, "kv": 8, "vocab": 128256, "T": 4096, "B": 1},
    "tiny": {"tokens": 6, "hidden": 16, "inner": 24, "heads": 2, "kv": 1, "vocab": 37, "T": 20, "B": 1},
}  # fmt: skip


def cases(scale: str, device: str, dtype: torch.dtype, liger: bool = True) -> list[Case]:
    """Return the cases; `liger=False` leaves out Liger's norm and SwiGLU, which Triton's interpreter cannot run."""
    from liger_kernel.transformers import functional as theirs

    s = SIZES[scale]
    R, C, V, head = s["tokens"], s["hidden"], s["vocab"], 128 if scale != "tiny" else 8

    def leaf(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype).requires_grad_()

    def targets() -> Tensor:
        return torch.randint(V, (R,), generator=torch.Generator(device).manual_seed(7), device=device)

    def turned() -> tuple:
        frequencies = 10000.0 ** -(torch.arange(0, head, 2, device=device) / head)
        angles = (torch.arange(R, device=device)[:, None] * frequencies).repeat(1, 2)[None]
        q, k = (leaf(1, R, heads, head, seed=heads).detach().transpose(1, 2) for heads in (s["heads"], s["kv"]))
        return q.requires_grad_(), k.requires_grad_(), angles.cos().to(dtype), angles.sin().to(dtype)

    rows = {"R": R, "C": C}
    found = [
        Case("rms_norm", rows, lambda: (leaf(R, C), leaf(C, seed=1)),
             ladder("rms_norm", theirs.liger_rms_norm if liger else None, 1e-6, inplace=True)),
        Case("swiglu", {"R": R, "I": s["inner"]}, lambda: (leaf(R, s["inner"]), leaf(R, s["inner"], seed=1)),
             ladder("swiglu", theirs.liger_swiglu if liger else None, inplace=True)),
        Case("rope", {"T": R, "H": s["heads"], "K": s["kv"], "D": head}, turned,
             ladder("rope", theirs.liger_rope, inplace=True)),
        Case("cross_entropy", {"R": R, "V": V}, lambda: (leaf(R, V, scale=2.0), targets()),
             ladder("cross_entropy", theirs.liger_cross_entropy, inplace=True)),
        Case("linear_cross_entropy", {"R": R, "C": C, "V": V}, lambda: (leaf(R, C), leaf(V, C, seed=1, scale=C**-0.5),
             targets()), ladder("linear_cross_entropy", theirs.liger_fused_linear_cross_entropy)),
    ]  # fmt: skip
    for D in (64, 128) if scale != "tiny" else (16,):
        for T in (s["T"], 2 * s["T"]):
            H = 2048 // D if scale == "large" else 8 if scale == "small" else 1
            sizes = {"B": s["B"], "H": H, "T": T, "D": D}
            make = partial(lambda shape: tuple(leaf(*shape, seed=seed) for seed in range(3)), (s["B"], H, T, D))
            found.append(Case("attention", sizes, make, attention_ways(naive=s["T"] == T)))
    return found


def ladder(kernel: str, liger: Way | None, *more: Any, **ours: Any) -> dict[str, Way]:
    """Return the ways of a kernel whose rival is Liger; `more` follows the arguments, `ours` is for rung 4 alone."""
    call = getattr(kernels, kernel)
    names = (NAIVE, "pytorch", "torch_compile")
    ways = {name: partial(_with, call, more, rung=rung) for rung, name in enumerate(names)}
    ways[OURS] = partial(_with, call, more, rung=4, **ours)
    return ways | ({LIGER: partial(_with, liger, more)} if liger else {})


def _with(call: Way, more: tuple, *arguments: Tensor, **named: Any) -> Any:
    return call(*arguments, *more, **named)


def attention_ways(naive: bool) -> dict[str, Way]:
    """Return attention's ways: rungs 0, 2 and 4, and SDPA; `naive=False` leaves out those that store T² scores."""
    rungs = {NAIVE: 0, "torch_compile": 2} if naive else {}
    ways = {name: partial(kernels.attention, rung=rung) for name, rung in {**rungs, OURS: 4}.items()}
    return {**ways, SDPA: flash}


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA's flash backend; on a GPU that has none (before Ampere), the backend that SDPA chooses."""
    if not q.is_cuda or torch.cuda.get_device_capability() < (8, 0):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# ---------------------------------------------------------------- a sweep of settings

WARPS = (4, 8, 16)
TRIED = {  # what does not fit on a card fails there, and is named
    ("attention", "forward"): {"M": (64, 128), "N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    ("attention", "full"): {"M": (32, 64), "N": (64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    ("rms_norm", "forward"): {"num_warps": WARPS},
    ("rms_norm", "full"): {"num_warps": WARPS, "num_stages": (1, 2, 3)},
    ("cross_entropy", "forward"): {"TILE": (2048, 4096, 8192, 16384), "num_warps": WARPS},
    ("cross_entropy", "full"): {"TILE": (2048, 4096, 8192, 16384), "num_warps": WARPS},
}
MODULES = {"attention": attention, "rms_norm": rms_norm, "cross_entropy": cross_entropy}


def instead(kernel: str, mode: str, said: dict[str, int]) -> dict[str, Any]:
    """Return what stands for names of the kernel's module under the setting `said`; of attention in one pass alone."""
    if kernel == "attention":
        chosen = attention.tiles
        return {"tiles": lambda x, backward: dict(said) if backward is (mode == "full") else chosen(x, backward)}
    names: dict[str, Any] = {"warps": lambda block: said["num_warps"]}
    if "num_stages" in said:
        names["stages"] = lambda block, itemsize: said["num_stages"]
    return names | ({"TILE": said["TILE"]} if "TILE" in said else {})


def sweep(scale: str, device: str, dtype: torch.dtype, tried: dict[tuple[str, str], dict] = TRIED) -> Iterator[Case]:
    """Yield a case of one mode for each of `tried`: rung 0, our kernel as it is, and with every combination."""
    checked = (case for case in cases(scale, device, dtype, liger=False) if NAIVE in case.ways)
    for case, mode in product(checked, MODES):
        if (case.kernel, mode) not in tried:
            continue
        grid, ours, module = tried[case.kernel, mode], case.ways[OURS], MODULES[case.kernel].__name__
        ways = {NAIVE: case.ways[NAIVE], OURS: Setting(ours)}
        for values in product(*grid.values()):
            said = dict(zip(grid, values, strict=True))
            name = " ".join(f"{key}={value}" for key, value in said.items())
            ways[name] = Setting(ours, module, instead(case.kernel, mode, said), said)
        yield replace(case, ways=ways, modes=(mode,))


def step(way: Way, arguments: tuple, mode: str) -> Callable[[], tuple]:
    """Return the function to time: the call, in mode "full" with the gradients of all that require one.

    Only its first call returns correct values: some ways write over their inputs, Liger's loss even in forward.
    """
    leaves = [t for t in arguments if t.requires_grad]
    given: list[Tensor] = []
    held = getattr(way, "held", nullcontext)

    def forward() -> tuple:
        with held():
            out = way(*arguments)
        return out if isinstance(out, tuple) else (out,)

    def full() -> tuple:
        out = forward()
        if not given:  # only once: otherwise the time to make them would count
            given.extend(torch.ones_like(one) for one in out)
        with held():
            return torch.autograd.grad(out, leaves, given)

    return forward if mode == "forward" else full


def right(case: Case) -> tuple[Case, list[str]]:
    """Return the case with those ways whose results and gradients are rung 0's in fp32, and why others are not in it.

    Any exception counts as the way's own failure: its kernel may not compile here, or memory may not suffice.
    """
    naive = case.ways.get(NAIVE)
    if naive is None:  # attention at twice the tokens: the same code was checked at T tokens
        return case, []
    exact = [t.detach().float().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in case.make()]
    wanted = {mode: step(naive, tuple(exact), mode)() for mode in case.modes}
    ways, failed = dict(case.ways), []
    for name, way in case.ways.items():
        try:
            check(way, case.make, wanted)
        except Exception as error:
            failed.append(f"{case.kernel}, {_sizes(case)}, {NAMES.get(name, name)}: {_one_line(error)}")
            del ways[name]
    return replace(case, ways=ways), failed


def check(way: Way, make: Callable[[], tuple], wanted: dict[str, tuple]) -> None:
    """Raise AssertionError if a way's results (in mode "full" its gradients) differ from those that are wanted."""
    for mode, truths in wanted.items():
        arguments = make()
        for at, (ours, truth) in enumerate(zip(step(way, arguments, mode)(), truths, strict=True)):
            error = ((ours.float() - truth).abs().max() / truth.abs().max().clamp(min=1e-30)).item()
            assert error <= TOLERANCE[arguments[0].dtype], f"{mode}, tensor {at}: {error:.1e} off"


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# ---------------------------------------------------------------- measurements, on a GPU only


def measure(case: Case, flush: Tensor) -> list[Row]:
    """Return the rows of a case, one per mode."""
    rows = []
    chosen = {name: way.said for name, way in case.ways.items() if isinstance(way, Setting)}
    for mode in case.modes:
        seconds: dict[str, list[float]] = {name: [] for name in case.ways}
        memory: dict[str, int] = {}
        for _ in range(ROUNDS):
            for name, way in case.ways.items():
                arguments = case.make()
                run = step(way, arguments, mode)
                seconds[name].append(gpu_seconds(run, flush))
                memory[name] = extra_bytes(run)
                del arguments, run
        dtype = str(case.make()[0].dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
        rows.append(Row(case.kernel, mode, dtype, case.sizes, seconds, memory, chosen))
    return rows


def gpu_seconds(run: Callable[[], object], flush: Tensor) -> float:
    """Return the median GPU time of `run`, in s, each time from an empty cache.

    To write over `flush` empties it, and keeps the GPU busy until the CPU has launched what follows: Python's launches
    take longer than a norm of 8192 rows, and would be timed instead.
    """

    def once() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        return start, end

    def ms(pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
        torch.cuda.synchronize()
        return median(start.elapsed_time(end) for start, end in pairs)

    about = ms([once() for _ in range(3)])  # warms up too
    return ms([once() for _ in range(min(100, max(5, int(TIMED_MS / max(about, 0.01)))))]) / 1e3


def extra_bytes(run: Callable[[], object]) -> int:
    """Return the peak of one call of `run` above what was allocated before it, results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def why_not() -> str | None:
    """Return why nothing can be measured here, None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU: torch.cuda.is_available() is False"
    lacking = [name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed: pip install 'llmlab[gpu]'"
    from llmlab.course.kernels.rungs import INTERPRETED

    return "TRITON_INTERPRET=1 is set: the interpreter is no GPU" if INTERPRETED else None


# ---------------------------------------------------------------- verdicts and tables


def ratio(row: Row, rival: str) -> float:
    """Return the median over rounds of our time over the rival's."""
    return median(ours / theirs for ours, theirs in zip(row.seconds[OURS], row.seconds[rival], strict=True))


def missed(rows: Iterable[Row], bars: dict[tuple[str, str], Bar]) -> list[str]:
    """Return a sentence for each bar that is not met: time, no more memory than Liger, O(N) memory of attention.

    1 % or 1 MiB more than Liger is allowed: a few numbers per row take that.
    """
    said = []
    rows = list(rows)
    for row in rows:
        bar = bars.get((row.kernel, row.mode))
        if bar is None or not {OURS, bar.rival} <= set(row.seconds):
            continue
        name = f"{row.kernel}, {row.mode}, {_sizes(row)}"
        if (found := ratio(row, bar.rival)) > bar.most:
            said.append(f"{name}: {found:.2f} times the time of {NAMES[bar.rival]}; the bar is {bar.most:.2f}")
        if bar.rival == LIGER and row.mode == "full" and row.memory[OURS] > 1.01 * row.memory[LIGER] + MiB:
            ours, theirs = (f"{row.memory[way] / GiB:.3f}" for way in (OURS, LIGER))
            said.append(f"{name}: {ours} GiB; the bar is Liger's {theirs} GiB")
    lengths = {(r.sizes["D"], r.mode, r.sizes["T"]): r for r in rows if r.kernel == "attention" and OURS in r.memory}
    for (D, mode, T), row in lengths.items():
        double = lengths.get((D, mode, 2 * T))
        if double and double.memory[OURS] > 2 * LINEAR * row.memory[OURS]:
            grew = double.memory[OURS] / row.memory[OURS]
            said.append(f"attention, {mode}, D={D}: {grew:.2f} times the memory at T={2 * T}; O(N) is 2")
    return said


def body(rows: Iterable[Row], bars: dict[tuple[str, str], Bar]) -> list[list[str]]:
    """Return the table's rows: medians in microseconds by way, our ratio to the bar's rival, memory in GiB."""
    lines = []
    for row in rows:
        bar = bars.get((row.kernel, row.mode))
        rival = bar.rival if bar and {OURS, bar.rival} <= set(row.seconds) else None
        times = [f"{median(row.seconds[way]) * 1e6:,.0f}" if way in row.seconds else "–" for way in NAMES]
        verdict = ["–", "", ""]
        if bar and rival:
            found = ratio(row, rival)
            verdict = [f"{found:.2f}", f"≤ {bar.most:.2f}", "met" if found <= bar.most else "MISSED"]
        memory = [f"{row.memory[way] / GiB:.3f}" if way in row.memory else "–" for way in (OURS, rival)]
        lines.append([f"{row.kernel}, {row.mode}, {_sizes(row)}, {row.dtype}", *times, *verdict, *memory])
    return lines


def _sizes(of: Case | Row) -> str:
    return " ".join(f"{name}={size}" for name, size in of.sizes.items())


def to_markdown(rows: list[Row], failed: list[str], bars: dict[tuple[str, str], Bar], gpu: str, made: str) -> str:
    """Return the page's table, what its words mean, what failed, and what made it."""
    notes = [
        f"- Microseconds of the GPU: medians of {ROUNDS} rounds in which the ways took turns. Forward; full: with "
        "backward.",
        "- The rival is Liger, for attention SDPA (its flash backend from compute capability 8.0 on); ours / rival is "
        "the median of the rounds' ratios. Memory in GiB, beyond the inputs.",
        *(f"- Missed: {sentence}." for sentence in missed(rows, bars)),
        *(f"- Failed, not timed: {sentence}" for sentence in failed),
    ]
    return "\n".join([f"**Kernels on one {gpu}**", "", *table(HEADER, body(rows, bars)), "", *notes, "", made])


SWEEP_HEADER = ["kernel, mode", "setting", "µs", "of the choice's time", "GiB"]


def sweep_body(rows: Iterable[Row]) -> list[list[str]]:
    """Return the rows of a sweep's table, the fastest setting first; the package's choice is named "chosen"."""
    lines = []
    for row in rows:
        share = {
            way: median(a / b for a, b in zip(row.seconds[way], row.seconds[OURS], strict=True)) for way in row.settings
        }
        for way in sorted(share, key=share.__getitem__):
            what = f"{row.kernel}, {row.mode}, {_sizes(row)}, {row.dtype}"
            time, memory = median(row.seconds[way]) * 1e6, row.memory[way] / GiB
            setting = "chosen" if way == OURS else way
            lines.append([what, setting, f"{time:,.0f}", f"{share[way]:.2f}", f"{memory:.3f}"])
    return lines


def sweep_page(rows: list[Row], failed: list[str], bars: dict, gpu: str, made: str) -> str:
    """Return a sweep's table, what fits nowhere or gave wrong results, and what made it."""
    notes = [
        f"- Microseconds of the GPU: medians of {ROUNDS} rounds in which the settings took turns. Attention's setting "
        "is forward's in mode forward, backward's in mode full.",
        *(f"- Left out: {sentence}" for sentence in failed),
    ]
    lines = table(SWEEP_HEADER, sweep_body(rows), words=True)
    return "\n".join([f"**Settings of our kernels on one {gpu}**", "", *lines, "", *notes, "", made])


def to_records(rows: list[Row], gpu: str, made: str) -> dict[str, Any]:
    """Return a record file: a time and a memory for each row and way."""
    environment = {name: version(name) for name in ("llmlab", "torch", "triton", "liger-kernel")}
    environment["date"] = date.today().isoformat()
    records = []
    for row in rows:
        first, *others = row.sizes
        for way in row.seconds:
            values = {"time": ("s", median(row.seconds[way])), "memory": ("bytes", row.memory[way])}
            for metric, (unit, value) in values.items():
                if row.settings and way not in row.settings:
                    continue  # rung 0, there to check the others
                records.append({
                    "operator": row.kernel, "provider": SWEPT if row.settings else way, "mode": row.mode,
                    "metric": metric, "unit": unit, "dtype": row.dtype,
                    "sizes": {name: row.sizes[name] for name in others}, "options": row.settings.get(way, {}),
                    "environment": environment, "varied": first, "at": [row.sizes[first]], "values": [value],
                })  # fmt: skip
    citation = f"benchmarks/kernels/kernel_times.py: {made}"
    return {"schema": SCHEMA, "kind": "operators", "gpu": gpu, "citation": citation, "records": records}


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the JSON and the table.")
@click.option("--sweep", "swept_too", is_flag=True, help="Our kernels alone, with other tiles, warps and stages.")
def main(out: Path | None, swept_too: bool) -> None:
    """Measure the kernels on this machine's GPU."""
    if reason := why_not():
        click.echo(f"{reason}. Nothing was measured, and nothing is written.", err=True)
        sys.exit(2)
    here = host()
    modern = here.supports_bf16
    bars = BARS if modern else OLD_BARS
    scale = "large" if (here.memory or 0) >= 40 * GiB else "small"
    dtype = torch.bfloat16 if modern else torch.float16
    if swept_too:
        sys.exit(run(sweep(scale, "cuda", dtype), scale, "cuda", {}, out, "kernel_sweep"))
    sys.exit(run(cases(scale, "cuda", dtype), scale, "cuda", bars, out))


def run(
    found: Iterable[Case], scale: str, device: str, bars: dict[tuple[str, str], Bar], out: Path | None,
    name: str = "kernel_times",
) -> int:  # fmt: skip
    """Measure the cases one after another, print and write NAME.md, NAME.json and the record; return the exit code.

    A setting of a sweep that does not fit on this GPU is left out, and no failure.
    """
    sweeping = name == "kernel_sweep"
    here = host()
    gpu = here.gpu.name if here.gpu else here.name
    made = provenance("llmlab", "torch", "triton", "liger-kernel")
    flush = torch.empty(FLUSH[scale], dtype=torch.int8, device=device)
    rows: list[Row] = []
    failed: list[str] = []
    for case in found:
        torch._dynamo.reset()  # otherwise the second length of attention would be compiled for any length
        try:
            able, sentences = right(case)
            failed += sentences
            new = measure(able, flush)
        except Exception as error:
            failed.append(f"{case.kernel}, {_sizes(case)}: {_one_line(error)}")
            new = []
        torch.cuda.empty_cache()
        rows += new
        click.echo("\n".join("   ".join(line) for line in (sweep_body(new) if sweeping else body(new, bars))))
        text = (sweep_page if sweeping else to_markdown)(rows, failed, bars, gpu, made)
        whole = json.dumps(to_records(rows, gpu, made), indent=1)
        if out and rows:
            write(out / f"{name}.md", text)
            write(out / f"{name}.json", whole)
            write_whole(output_folder() / slug(gpu) / f"{name}.json", whole + "\n")
    click.echo(text)
    return 1 if (failed and not sweeping) or missed(rows, bars) else 0


if __name__ == "__main__":
    main()
