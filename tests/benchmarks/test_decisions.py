"""The table of decisions counts what happened and what was said."""


import llmlab as lab
from benchmarks.plans import decisions


def test_all_published_steps_of_a_t4_are_counted_once_and_kinds_are_apart():
    in_view, later = decisions.steps(False), decisions.steps(True)
    assert in_view and all(row.outcome == decisions.FITS for row in in_view)
    assert {row.outcome for row in later} == {decisions.FITS, decisions.OVER}
    sessions = [{row.environment["session"] for row in rows} for rows in (in_view, later)]
    assert not sessions[0] & sessions[1]


def test_llmlabs_verdicts_make_no_mistake_on_steps_that_ran_out_of_memory():
    said = [decisions.llmlab_verdict(lab.model(row.model), row.run) for row in decisions.steps(True)
            if row.outcome == decisions.OVER]  # fmt: skip
    assert said and "fits" not in said
