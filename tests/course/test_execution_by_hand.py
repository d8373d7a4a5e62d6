"""What the page on how a GPU runs a kernel derives by hand agrees with formulas, records and published figures."""

import pytest

import llmlab as lab
from llmlab.archive import figure
from llmlab.course.job import GPU, MODEL
from llmlab.course.kernels.occupancy import REGISTERS, occupancy
from llmlab.formulas.time.efficiency import efficiencies

RATES, A6000 = efficiencies()[GPU], lab.gpu("RTX-A6000")
PUBLISHED = figure("sgemm-cuda")


def test_tiles_of_128_are_bound_by_bytes_on_a_t4_and_the_sums_of_256_fill_its_registers():
    assert 128 < 2 * RATES.matmul["fp16"] / RATES.bandwidth < 256
    assert REGISTERS == 256 * 256


def test_the_bytes_of_a_warp_predict_the_gain_of_coalescing():
    assert PUBLISHED["coalesced"] / PUBLISHED["naive"] == pytest.approx(33 / 5, rel=0.03)
    for name, moved in (("naive", 33), ("coalesced", 5)):  # bytes per multiply-add
        assert PUBLISHED[name] > 6 * 2 * A6000.bandwidth / moved  # so caches answer five of six
    assert PUBLISHED["tiles of 32"] < 2 * A6000.bandwidth / 0.25


def test_the_faster_kernel_has_the_lower_occupancy():
    assert occupancy(256, 80, 8192, A6000) < min(occupancy(1024, registers, 0, A6000) for registers in range(8, 65))
    assert PUBLISHED["tiles of 128, 8 × 8 per thread"] > 8 * PUBLISHED["coalesced"]


def test_checkpointing_costs_a_small_step_on_an_h200_more_than_its_kernels():
    runs = [lab.Training(1, 1024, precision="autocast-bf16", attention="sdpa", checkpointing=way)
            for way in (None, "full")]  # fmt: skip
    plain, full = (lab.records(MODEL, run, "H200")[0].step_seconds for run in runs)
    without, repeated = (lab.estimate(MODEL, run, "H200") for run in runs)
    kernels = [report.step_seconds - report.time["launches"] for report in (without, repeated)]
    assert full - plain > 4 * (kernels[1] - kernels[0]) > 0
