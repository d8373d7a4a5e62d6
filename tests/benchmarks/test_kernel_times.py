"""benchmarks/kernels/kernel_times.py where no GPU is: what it runs, its verdicts, its tables, and its refusal."""
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import kernel_times as bench
from llmlab.archive import OperatorRecord
from llmlab.archive.lookup import load
from llmlab.archive.operators import sweep, swept
from llmlab.course.kernels.ladder import attention, cross_entropy, rms_norm

if sys.platform != "linux":
    pytest.skip("Liger needs Triton, which has wheels for Linux alone", allow_module_level=True)

FOLDER = Path(__file__).parents[2] / "benchmarks"


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


def test_what_it_writes_is_a_record_file_that_the_book_can_read(tmp_path):
    data = bench.to_records([row(ours=1e-3, rival=2e-3, sizes={"R": 8, "C": 4})], "A100-80GB", "made here")
    (tmp_path / "kernel_times.json").write_text(json.dumps(data), encoding="utf-8")
    found = [record for series in load("operators", sweep, tmp_path) for record in series]
    assert all(isinstance(record, OperatorRecord) for record in found)
    assert {(r.provider, r.metric, r.value) for r in found} == {
        ("llmlab", "time", 2e-3), ("liger", "time", 4e-3), ("llmlab", "memory", 100), ("liger", "memory", 100),
    }  # fmt: skip
    assert found[0].sizes == {"R": 8, "C": 4} and "kernel_times.py: made here" in found[0].citation


SMALL = {  # settings for 20 tokens, 6 rows, 37 columns
    ("attention", "forward"): {"M": (32,), "N": (16,), "num_warps": (4,), "num_stages": (2,)},
    ("attention", "full"): {"M": (16,), "N": (16, 32), "num_warps": (4,), "num_stages": (1,)},
    ("rms_norm", "full"): {"num_warps": (4,), "num_stages": (1, 2)},
    ("cross_entropy", "forward"): {"TILE": (16,), "num_warps": (4,)},
}


def test_each_setting_of_a_sweep_gives_what_rung_0_gives_and_holds_in_its_own_pass():
    cases = list(bench.sweep("tiny", DEVICE, torch.float16, SMALL))
    assert {(case.kernel, *case.modes): len(case.ways) - 2 for case in cases} == {
        key: math.prod(map(len, grid.values())) for key, grid in SMALL.items()
    }
    for case in cases:
        able, failed = bench.right(case)
        assert able.ways == case.ways and failed == []
    by_mode = {(case.kernel, *case.modes): case for case in cases}
    x = torch.empty(1, 1, 20, 16)
    before = [attention.tiles(x, backward=backward) for backward in (False, True)]
    with by_mode["attention", "full"].ways["M=16 N=32 num_warps=4 num_stages=1"].held():
        found = [attention.tiles(x, backward=backward) for backward in (False, True)]
    assert found == [before[0], {"M": 16, "N": 32, "num_warps": 4, "num_stages": 1}] and found[1] != before[1]
    assert [attention.tiles(x, backward=backward) for backward in (False, True)] == before
    with by_mode["rms_norm", "full"].ways["num_warps=4 num_stages=1"].held():
        assert rms_norm.warps(4096) == 4 and rms_norm.stages(4096, 2) == 1
    with by_mode["cross_entropy", "forward"].ways["TILE=16 num_warps=4"].held():
        assert cross_entropy.TILE == 16


def test_a_sweep_is_recorded_with_its_settings_the_fastest_first(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setenv("LLMLAB_RECORDS", str(tmp_path / "records"))
    small = {("rms_norm", "full"): {"num_warps": (4, 8), "num_stages": (1,)}}
    found = bench.sweep("tiny", DEVICE, torch.float16, small)
    assert bench.run(found, "tiny", DEVICE, {}, tmp_path / "results", "kernel_sweep") == 0
    made = json.loads((tmp_path / "results" / "kernel_sweep.json").read_text(encoding="utf-8"))
    settings = [record["options"] for record in made["records"] if record["metric"] == "time"]
    assert settings == [{}, {"num_warps": 4, "num_stages": 1}, {"num_warps": 8, "num_stages": 1}]
    assert {record["provider"] for record in made["records"]} == {bench.SWEPT}
    (folder,) = (tmp_path / "records").iterdir()
    read = [record for series in load("operators", sweep, folder) for record in series]
    times = [r for r in read if r.metric == "time"]
    assert [dict(r.options) for r in times] == settings
    ((chosen, best),) = swept(times)
    assert chosen.options == {} and best.value == min(r.value for r in times)
    faster = replace(times[1], value=0.5 * chosen.value)
    assert swept([faster, chosen, replace(chosen, mode="forward")]) == [
        (chosen, faster), (replace(chosen, mode="forward"),) * 2,
    ]  # fmt: skip
    assert swept([faster]) == []
    slow = bench.Row("rope", "full", "bf16", {}, {bench.OURS: [2e-3], "M=1": [1e-3]}, {bench.OURS: 0, "M=1": 0},
                     {bench.OURS: {}, "M=1": {"M": 1}})  # fmt: skip
    assert [line[1:4] for line in bench.sweep_body([slow])] == [["M=1", "1,000", "0.50"], ["chosen", "2,000", "1.00"]]


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is here")
def test_without_a_gpu_it_says_so_writes_nothing_and_exits_with_2(tmp_path):
    command = [sys.executable, "-m", "benchmarks.kernels.kernel_times", "--out", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "no CUDA GPU" in done.stderr and "Nothing was measured" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()
