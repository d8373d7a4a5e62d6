"""The recorded comparison of optimizers is fair, and can be repeated."""

import pytest

from llmlab.course.experiments.learning_rates import (
    OPTIMIZERS,
    SCHEDULES,
    SEEDS,
    STEPS,
    WARMUP,
    best,
    learn,
    losses,
    plan,
    results,
)


def test_every_run_of_the_plan_was_recorded():
    assert {(one.optimizer, one.rate, one.seed, one.schedule) for one in results()} == set(plan())
    assert len(results()) == len(plan())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_best_rate_lies_inside_of_the_rates_that_were_tried(optimizer):
    rates = sorted(losses(optimizer))
    assert best(losses(optimizer))[0] in rates[1:-1]
    assert all(len(seeds) == len(SEEDS) for seeds in losses(optimizer).values())


def test_a_run_can_be_repeated():
    rate, seed = 0.003, 1
    assert learn("AdamW", rate, seed).loss == pytest.approx(losses("AdamW")[rate][seed], rel=0.02)


def test_schedules_differ_only_in_the_first_steps():
    for step in range(WARMUP, STEPS):
        assert len({schedule(step) for schedule in SCHEDULES.values()}) == 1
    first = {name: [schedule(step) for step in range(WARMUP)] for name, schedule in SCHEDULES.items()}
    assert first["no warm-up"] == [1.0] * WARMUP and first["moments first"] == [0.0] * WARMUP
    assert first["warm-up"] == pytest.approx([(step + 1) / WARMUP for step in range(WARMUP)])
