"""The sums that the page on launching does by hand agree with the formulas."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.archive import figure
from llmlab.course.job import H100, MODEL, MODEL_70B, job
from llmlab.formulas.reliability import checkpoint_bytes, goodput, mtbf, save_seconds, young
from llmlab.hardware.links import link

RUN, R = job("16-three-d"), 600
FAILURES = figure("llama-3-interruptions")
ONE_GPU = FAILURES["days"] * 86400 * FAILURES["GPUs"] / FAILURES["unexpected"]
M = mtbf(512, ONE_GPU)
C = checkpoint_bytes(MODEL_70B, RUN)


def lost(save, between, restart):
    return (young(save, between) + restart) / between


def test_the_checkpoint_of_the_job():
    assert 14 * lab.model(MODEL_70B).parameters == C
    adapter = link("Ethernet-100").reached
    assert save_seconds(C, 1, adapter, 100e9) == pytest.approx(82.3, abs=0.05)
    assert save_seconds(C, 64, adapter, 100e9) == C / 100e9


def test_the_interval_and_the_loss_of_the_job():
    save = C / 100e9
    assert young(save, M) / 60 == pytest.approx(44, abs=0.5)
    assert young(save, M) / lab.estimate(MODEL_70B, RUN, H100).step_seconds == pytest.approx(267, abs=1)
    assert lost(save, M, R) == pytest.approx(0.0091, abs=1e-4)
    best = goodput(young(save, M), save, M, R)
    assert all(best - goodput(60 * minutes, save, M, R) < 0.005 for minutes in (20, 120))


def test_the_worked_problems():
    between = mtbf(16384, ONE_GPU)
    size = checkpoint_bytes("meta-llama/Llama-3.1-405B", RUN)
    assert lost(size / 100e9, between, R) == pytest.approx(0.155, abs=5e-4)
    assert lost(size / 2e12, between, R) == pytest.approx(0.076, abs=1e-3)
    assert young(size / 2e12, between) + 860 == pytest.approx(0.1 * between, abs=5)
    assert goodput(young(size / 100e9, between), size / 100e9, between, R) - goodput(
        3600, size / 100e9, between, R
    ) == pytest.approx(0.067, abs=1e-3)
    part_one = job("10-flash-attention")
    sizes = {name: checkpoint_bytes(MODEL, replace(part_one, optimizer=name)) for name in ("adafactor", "adamw")}
    assert lost(sizes["adafactor"] / 50e6, 10800, 300) == pytest.approx(0.163, abs=1e-3)
    assert lost(sizes["adamw"] / 50e6, 10800, 300) == pytest.approx(0.262, abs=1e-3)


@pytest.mark.parametrize(("dp", "accumulation", "share"), [(31, 32, 0.97), (16, 64, 0.53)])
def test_the_speed_with_fewer_copies(dp, accumulation, share):
    whole, fewer = (
        lab.estimate(MODEL_70B, run, H100)
        for run in (RUN, replace(RUN, dp=dp, accumulation=accumulation))
    )
    assert fewer.tokens_per_second / whole.tokens_per_second == pytest.approx(share, abs=0.005)
    assert fewer.peak_allocated < lab.gpu(H100).room(1)
