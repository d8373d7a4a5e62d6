"""The recorded comparison of optimizers is fair, and can be repeated."""

import pytest

from llmlab.course.experiments.learning_rates import (
    SCHEDULES,
    SEEDS,
    STEPS,
    WARMUP,
    best,
    learn,
    losses,
)


def test_a_run_can_be_repeated():
    rate, seed = 0.003, 1
    assert learn("AdamW", rate, seed).loss == pytest.approx(losses("AdamW")[rate][seed], rel=0.02)


def test_schedules_differ_only_in_the_first_steps():
    for step in range(WARMUP, STEPS):
        assert len({schedule(step) for schedule in SCHEDULES.values()}) == 1
    first = {name: [schedule(step) for step in range(WARMUP)] for name, schedule in SCHEDULES.items()}
    assert first["no warm-up"] == [1.0] * WARMUP and first["moments first"] == [0.0] * WARMUP
    assert first["warm-up"] == pytest.approx([(step + 1) / WARMUP for step in range(WARMUP)])


def mean(optimizer):
    seeds = best(losses(optimizer))[1]
    return sum(seeds) / len(seeds)


def test_adafactor_leads_because_of_its_step_size():
    """The two hybrids separate the moments from the size of the step; the norms alone are half of the lead."""
    lead = mean("AdamW") - mean("Adafactor")
    assert lead > 0.25
    assert mean("AdamW") - mean("AdamW, relative step") > 0.8 * lead
    assert abs(mean("AdamW") - mean("Adafactor, absolute step")) < 0.1 * lead
    assert mean("AdamW") - mean("AdamW, 30 × for norms") == pytest.approx(lead / 2, rel=0.1)


def test_8_bit_states_cost_nothing_and_sgd_is_last():
    assert mean("8-bit AdamW") == pytest.approx(mean("AdamW"), abs=0.01)
    ranking = sorted(("SGD", "SGD, momentum", "Lion", "AdamW", "Muon + AdamW", "Adafactor"), key=mean)
    assert ranking == ["Muon + AdamW", "Adafactor", "AdamW", "Lion", "SGD, momentum", "SGD"]


def test_good_moments_do_not_replace_a_warm_up():
    by_schedule = {schedule: losses("AdamW", schedule) for schedule in SCHEDULES}
    at_best = {schedule: sum(by_rate[0.003]) / len(SEEDS) for schedule, by_rate in by_schedule.items()}
    assert at_best["warm-up"] < at_best["no warm-up"] < at_best["moments first"]
    idle = sum(by_schedule["moments first"][0.001]) - sum(by_schedule["no warm-up"][0.001])
    assert idle / len(SEEDS) < 0.1


def test_sgd_needs_a_warm_up_at_a_large_rate_alone():
    warm, cold = (losses("SGD, momentum", schedule) for schedule in ("warm-up", "no warm-up"))
    assert [rate for rate in warm if sum(warm[rate]) < sum(cold[rate])] == [1.0]
