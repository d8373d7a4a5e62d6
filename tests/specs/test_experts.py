"""The load of expert-parallel ranks."""

import pytest

import llmlab as lab


def test_the_busiest_rank_is_that_of_consecutive_experts():
    """Two popular experts on one rank are worse than on two, and with a rank for each expert one popular expert counts
    alone."""
    together, apart = [40, 40, 10, 10], [40, 10, 40, 10]
    assert lab.expert_imbalance(together, ep=2) == pytest.approx(1.6)
    assert lab.expert_imbalance(apart, ep=2) == pytest.approx(1)
    assert lab.expert_imbalance(together, ep=4) == lab.expert_imbalance(apart, ep=4) == pytest.approx(1.6)
    assert lab.expert_imbalance(together, ep=1) == 1


def test_each_layer_waits_for_its_own_busiest_rank():
    """Loads that would cancel in their sum over the layers do not cancel in time."""
    assert lab.expert_imbalance([[30, 10], [10, 30]], ep=2) == pytest.approx(1.5)


def test_a_measured_load_is_one_that_a_run_takes():
    run = lab.Training(dp=4, ep=2, expert_imbalance=lab.expert_imbalance([3, 1, 1, 1], ep=2))
    assert run.expert_imbalance == pytest.approx(4 / 3)


@pytest.mark.parametrize(("tokens", "ep"), [([], 1), ([0, 0], 2), ([1, -1], 1), ([1, float("nan")], 1),
                                            ([1, "2"], 1), ([1, 2, 3], 2), ([1, 2], 0), ([1, 2], 4)])  # fmt: skip
def test_what_no_router_counts_is_refused(tokens, ep):
    with pytest.raises(lab.SpecError, match="give"):
        lab.expert_imbalance(tokens, ep)
