"""The benchmark of plans: the margin follows from measured steps; alternatives are one model on the same GPUs."""


import llmlab as lab
from benchmarks.plans import plans
from llmlab.planning.confirm import MARGIN


def test_the_margin_is_what_nine_in_ten_steps_reserved_more():
    more = plans.excess()
    assert len(more) >= 30 and more == sorted(more)
    nine_in_ten = more[int(0.9 * len(more))]
    assert nine_in_ten <= MARGIN < nine_in_ten + 0.01


def test_alternatives_differ_in_how_they_run_alone():
    for (_, label, card, many, length, method), of in plans.alternatives().items():
        alike = {(row.label, row.card, row.run.world_size, row.run.seq_len, plans.method(row)) for row in of}
        assert alike == {(label, card, many, length, method)}
        assert len({row.run for row in of}) > 1
        assert plans.UNSEEN not in {row.group for row in of}
    for of in plans.alternatives(told=False).values():
        assert len({plans.method(row) for row in of}) > 1


def test_runs_that_ran_out_of_memory_elsewhere_are_never_said_to_fit():
    over = [case for case in plans.cases() if not case.ran and case.card != "T4"]
    assert len(over) == len(plans.OVER)
    for case in over:
        assert plans.decided(case, simulate=False)[0] != plans.FITS, case.id


def test_a_step_that_ran_is_said_to_fit():
    case = plans.Case("", "", "gpt2", lab.Training(seq_len=64), "T4", True)
    assert plans.decided(case, simulate=False) == (plans.FITS, "estimate")
