"""benchmarks/kernels/kernel_times.py where no GPU is: what it runs, its verdicts, its tables, and its refusal."""
import json
import math
import subprocess
import sys
from itertools import product

import pytest
import torch

from benchmarks.kernels import kernel_times as bench
from llmlab.archive import OperatorRecord
from llmlab.archive.lookup import load
from llmlab.archive.operators import sweep
from llmlab.course.kernels.ladder import attention, cross_entropy, rms_norm

if sys.platform != "linux":
    pytest.skip("Liger needs Triton, which has wheels for Linux alone", allow_module_level=True)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = bench.cases("tiny", DEVICE, torch.float16, liger=DEVICE == "cuda")


def row(kernel="rms_norm", mode="full", ours=1.0, rival=1.0, memory=100, theirs=100, sizes=None, against=bench.LIGER):
    seconds = {bench.OURS: [ours * n for n in (1, 2, 9)], against: [rival * n for n in (1, 2, 9)]}
    return bench.Row(kernel, mode, "bf16", sizes or {"R": 8}, seconds, {bench.OURS: memory, against: theirs})


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


def test_what_the_kernels_choose_is_among_what_a_sweep_tries():
    for capability, head, backward in product(((8, 0), (9, 0)), (64, 128), (False, True)):
        grid = bench.TRIED["attention", "full" if backward else "forward"]
        chosen = attention.tiles_for(head, 2, capability, backward)
        assert set(chosen) == set(grid) and all(chosen[name] in grid[name] for name in grid)
    assert rms_norm.warps(2 * 4096) in bench.WARPS
    assert cross_entropy.TILE in bench.TRIED["cross_entropy", "full"]["TILE"]


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is here")
def test_without_a_gpu_it_says_so_writes_nothing_and_exits_with_2(tmp_path):
    command = [sys.executable, "-m", "benchmarks.kernels.kernel_times", "--out", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "no CUDA GPU" in done.stderr and "Nothing was measured" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()
