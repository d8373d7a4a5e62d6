"""The sums that the chapter on offloading does by hand agree with the prediction."""

from dataclasses import replace
from itertools import pairwise

import pytest

import llmlab as lab
from llmlab.course.job import H100, MODEL_8B, job
from llmlab.formulas.memory.precision import state_bytes
from llmlab.formulas.time.offload import offloaded_step, schedule
from llmlab.formulas.time.step import passes
from llmlab.hardware.nodes import adam_share, host_of, hosts, to_host

SPEC = lab.model(MODEL_8B)
N = SPEC.parameters
ONE = replace(job("12-zero"), dp=1, zero=0, checkpointing="full", offload="optimizer")
DESKTOP = replace(ONE, kernels="liger")
MACHINES = {
    "eighth": (ONE, H100, 8), "whole": (ONE, H100, 1), "A100": (ONE, "A100-80GB", 8),
    "desktop": (DESKTOP, "RTX-4090", 1),
}  # fmt: skip


def beta_host(card, sharing):
    return adam_share() * host_of(card).bandwidth / sharing


def step(run, card, sharing, **how):
    return offloaded_step(SPEC, run, lab.gpu(card), passes(SPEC, run, lab.gpu(card)).seconds, gpus=sharing, **how)


@pytest.mark.parametrize("name", MACHINES)
def test_the_step_is_passes_and_update_and_copies_hide(name):
    run, card, sharing = MACHINES[name]
    timed = step(run, card, sharing)
    assert timed.adam == pytest.approx(30 * N / beta_host(card, sharing))
    assert timed.seconds == pytest.approx(timed.compute + timed.adam)
    assert timed.down == pytest.approx(2 * N / to_host(card)) and timed.down < timed.backward


@pytest.mark.parametrize("name", MACHINES)
def test_at_the_bound_the_update_takes_as_long_as_the_passes(name):
    run, card, sharing = MACHINES[name]
    found = step(run, card, sharing)
    rate = 8 * N * run.tokens / found.compute
    bound = 30 / 8 * rate / beta_host(card, sharing)
    assert found.compute * bound / run.tokens == pytest.approx(found.adam)


@pytest.mark.parametrize(("name", "sequences"), [("eighth", 118), ("desktop", 35)])
def test_the_worked_problems(name, sequences):
    run, card, sharing = MACHINES[name]
    found = step(replace(run, accumulation=sequences), card, sharing)
    assert 0.085 < found.adam / found.compute <= 0.1


def test_eight_gpus_share_the_update_of_their_host():
    found = step(replace(ONE, dp=8, zero=3, accumulation=15), H100, 8)
    assert found.adam == pytest.approx(30 * N / beta_host(H100, 1))
    assert 0.085 < found.adam / found.compute <= 0.1


def test_new_weights_hide_behind_the_update_on_every_host_of_the_table():
    for host in hosts().values():
        for card in host.gpu_names:
            assert adam_share() * host.bandwidth < 15 * to_host(card)  # even if one GPU has the whole host


def test_sums_of_gradients_on_a_desktop_take_longer_than_one_sequence():
    found = step(DESKTOP, "RTX-4090", 1)
    on_cpu, over_pcie = 10 * N / beta_host("RTX-4090", 1), 2 * N / to_host("RTX-4090")
    assert over_pcie < found.compute < on_cpu < 1.2 * found.compute


def test_a_delayed_update_hides_behind_the_passes_of_the_next_step():
    found = step(replace(ONE, accumulation=12), H100, 8)
    plain, delayed = (schedule(found, 96, steps=20, delayed=late) for late in (False, True))
    passes_of = [[start for lane, start, _, kind in works if kind == "forward"] for works in (plain, delayed)]
    assert (passes_of[0][-1] - passes_of[0][0]) / 19 == pytest.approx(found.compute + found.adam, rel=0.01)
    assert (passes_of[1][-1] - passes_of[1][1]) / 18 == pytest.approx(found.compute + found.up, rel=0.01)
    for works in (plain, delayed):
        returned = [work[2] - work[1] for work in works if work[0] == "PCIe up"]
        assert sum(returned) == pytest.approx(20 * found.up)  # the weights of every update, also of the last
        for lane in {work[0] for work in works}:  # each does one thing at a time
            spans = sorted(work[1:3] for work in works if work[0] == lane)
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))


def test_8_bit_adam_halves_states_with_master_weights():
    assert 4 + state_bytes("adamw-8bit", 4, N, 0) / N == pytest.approx(4 + 2 * (1 + 4 / 256), rel=1e-3)


def test_a_model_on_each_of_eight_gpus_waits_eight_times_as_long_as_one_that_zero_divides():
    """On eight A100s, each with a model of its own, or with one model that ZeRO-2 divides."""
    run = lab.Training(8, 2048, "mixed-bf16", checkpointing="full", offload="optimizer")
    assert step(run, "A100-80GB", 8).seconds == pytest.approx(15.4, abs=0.05)
    assert step(replace(run, dp=8, zero=2), "A100-80GB", 8).seconds == pytest.approx(6.4, abs=0.05)
