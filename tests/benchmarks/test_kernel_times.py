"""benchmarks/kernel_times.py where no GPU is: what it runs, its verdicts, its tables, and its refusal."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmlab.archive import OperatorRecord
from llmlab.archive.lookup import load
from llmlab.archive.operators import sweep

if sys.platform != "linux":
    pytest.skip("Liger needs Triton, which has wheels for Linux alone", allow_module_level=True)

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))  # scripts, not a package

import kernel_times as bench  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = bench.cases("tiny", DEVICE, torch.float16, liger=DEVICE == "cuda")


def row(kernel="rms_norm", mode="full", ours=1.0, rival=1.0, memory=100, theirs=100, sizes=None, against=bench.LIGER):
    seconds = {bench.OURS: [ours * n for n in (1, 2, 9)], against: [rival * n for n in (1, 2, 9)]}
    return bench.Row(kernel, mode, "bf16", sizes or {"R": 8}, seconds, {bench.OURS: memory, against: theirs})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kernel}-{case.sizes}")
def test_every_way_of_a_kernel_gives_what_rung_0_gives_in_fp32(case):
    ways = {name: way for name, way in case.ways.items() if name != "torch_compile"}  # Inductor has tests of its own
    able, failed = bench.right(bench.Case(case.kernel, case.sizes, case.make, ways))
    assert able.ways == ways and failed == []


class Clock:
    """A CUDA event where no GPU is: how often the clock was read, as milliseconds."""

    reads = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Clock.reads += 1
        self.at = Clock.reads

    def elapsed_time(self, end):
        return float(end.at - self.at)


def test_what_fails_is_named_and_the_other_bars_are_measured_and_kept(monkeypatch, tmp_path):
    """From main's loop on, without a GPU: wrong results, a kernel that does not compile, a case that runs nowhere."""
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "TIMED_MS", 5)
    monkeypatch.setenv("LLMLAB_RECORDS", str(tmp_path / "records"))
    by_name = {case.kernel: case for case in CASES}
    rope, swiglu, loss = (by_name[name] for name in ("rope", "swiglu", "cross_entropy"))

    def raising(*arguments):
        raise RuntimeError("ptxas said no\nand a long log")

    def nothing():
        raise torch.OutOfMemoryError("no memory for the inputs")

    wrong = {bench.NAIVE: swiglu.ways[bench.NAIVE], bench.OURS: lambda gate, up: gate * up}
    cases = [
        bench.Case("swiglu", swiglu.sizes, swiglu.make, wrong),
        bench.Case("cross_entropy", loss.sizes, nothing, loss.ways),
        bench.Case("rope", rope.sizes, rope.make, {**rope.ways, "torch_compile": raising}),
    ]
    assert bench.run(cases, "tiny", DEVICE, bench.BARS, tmp_path / "results") == 1
    text = (tmp_path / "results" / "kernel_times.md").read_text(encoding="utf-8")
    failed = [line.removeprefix("- Failed, not timed: ") for line in text.splitlines() if "Failed" in line]
    assert failed[0].startswith("swiglu, R=6 I=24, ours: AssertionError: forward, tensor 0: ")
    assert failed[1:] == [
        "cross_entropy, R=6 V=37: OutOfMemoryError: no memory for the inputs",
        "rope, T=6 H=2 K=1 D=8, compiled: RuntimeError: ptxas said no",
    ]
    (full,) = (line for line in text.splitlines() if line.startswith("| rope, full"))
    assert "| 1.00 | ≤ 1.10 | met |" in full and full.count("–") == 2  # compiled, and SDPA, which is no rival here
    (others,) = (line for line in text.splitlines() if line.startswith("| swiglu, full"))
    assert "met" not in others and "| 1,000 |" in others
    found = {(r.operator, r.provider) for s in load("operators", sweep, tmp_path / "records") for r in s}
    assert {("rope", "llmlab"), ("rope", "liger"), ("swiglu", "naive")} <= found
    assert ("swiglu", "llmlab") not in found and ("rope", "torch_compile") not in found


def test_each_case_has_its_rival():
    interpreted = {"rms_norm", "swiglu"} if DEVICE == "cpu" else set()
    for case in CASES:
        rival = bench.BARS[case.kernel, "full"].rival
        assert {bench.OURS, *({rival} - ({bench.LIGER} if case.kernel in interpreted else set()))} <= set(case.ways)
    assert {case.kernel for case in CASES} == {kernel for kernel, _ in bench.BARS}


def test_the_ratio_is_of_rounds_that_ran_side_by_side():
    """A machine that slows down after the first round changes both times and no ratio."""
    slowing = bench.Row("rope", "full", "bf16", {}, {bench.OURS: [1, 4, 4], bench.LIGER: [2, 8, 8]}, {})
    assert bench.ratio(slowing, bench.LIGER) == 0.5


def test_a_bar_that_is_missed_is_said_with_its_numbers():
    assert bench.missed([row(ours=1.09)], bench.BARS) == []
    assert bench.missed([row(ours=1.2)], bench.BARS) == [
        "rms_norm, full, R=8: 1.20 times the time of Liger; the bar is 1.10"
    ]
    assert bench.missed([row(memory=1 << 20, theirs=1 << 15)], bench.BARS) == []  # a few numbers per row
    more = bench.missed([row(memory=3 << 29, theirs=1 << 30)], bench.BARS)
    assert more == ["rms_norm, full, R=8: 1.500 GiB; the bar is Liger's 1.000 GiB"]
    fast = row("attention", "forward", 1.4, against=bench.SDPA, sizes={"D": 64, "T": 8})
    assert bench.missed([fast], bench.BARS) == []


def test_attention_whose_memory_grows_with_the_square_of_its_length_is_missed():
    short, linear, square = (
        row("attention", memory=memory, against=bench.SDPA, sizes={"D": 64, "T": T})
        for T, memory in ((4096, 100), (8192, 200), (8192, 400))
    )
    assert bench.missed([short, linear], bench.BARS) == []
    assert bench.missed([short, square], bench.BARS) == [
        "attention, full, D=64: 4.00 times the memory at T=8192; O(N) is 2"
    ]


def test_before_ampere_attention_is_held_to_naive_attention():
    slow = row("attention", ours=1.01, against=bench.NAIVE, sizes={"D": 64, "T": 8})
    assert bench.missed([slow], bench.BARS) == [] and len(bench.missed([slow], bench.OLD_BARS)) == 1


def test_the_table_shows_medians_ratio_bar_verdict_and_memory():
    slow = row(ours=1.2e-3, rival=1e-3, memory=1 << 30, theirs=1 << 30)
    text = bench.to_markdown([slow], [], bench.BARS, "T4", "made here")
    line = next(line for line in text.splitlines() if line.startswith("| rms_norm, full, R=8, bf16 |"))
    assert "| – | – | – | 2,400 | 2,000 | – | 1.20 | ≤ 1.10 | MISSED | 1.000 | 1.000 |" in line
    assert text.startswith("**Kernels on one T4**") and "- Missed: rms_norm" in text and text.endswith("made here")


def test_what_it_writes_is_a_record_file_that_the_book_can_read(tmp_path):
    data = bench.to_records([row(ours=1e-3, rival=2e-3, sizes={"R": 8, "C": 4})], "A100-80GB", "made here")
    (tmp_path / "kernel_times.json").write_text(json.dumps(data), encoding="utf-8")
    found = [record for series in load("operators", sweep, tmp_path) for record in series]
    assert all(isinstance(record, OperatorRecord) for record in found)
    assert {(r.provider, r.metric, r.value) for r in found} == {
        ("llmlab", "time", 2e-3), ("liger", "time", 4e-3), ("llmlab", "memory", 100), ("liger", "memory", 100),
    }  # fmt: skip
    assert found[0].sizes == {"R": 8, "C": 4} and "kernel_times.py: made here" in found[0].citation


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is here")
def test_without_a_gpu_it_says_so_writes_nothing_and_exits_with_2(tmp_path):
    command = [sys.executable, str(FOLDER / "kernel_times.py"), "--out", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "no CUDA GPU" in done.stderr and "Nothing was measured" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()


def test_no_script_is_named_as_a_package_that_transformers_looks_for():
    """A script finds files beside it first: a kernels.py there would be imported by transformers."""
    names = {"kernels", "torch", "triton", "peft", "accelerate", "deepspeed", "bitsandbytes", "liger_kernel"}
    assert not names & {path.stem for path in FOLDER.glob("*.py")}
    assert importlib.util.find_spec("kernel_times").origin == str(FOLDER / "kernel_times.py")
