"""Which rank is where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.hardware.links import cluster
from llmlab.specs import mesh as places

degrees = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in places.AXES})


@given(degrees, st.data())
def test_coordinates_are_a_numbering_and_groups_share_all_but_one(of, data):
    run = lab.Training(seq_len=64, **of)
    found = [tuple(places.coordinates(run, rank).values()) for rank in range(run.world_size)]
    assert len(set(found)) == run.world_size
    rank = data.draw(st.integers(0, run.world_size - 1))
    for axis in places.AXES:
        group = places.ranks_along(run, axis, rank)
        assert rank in group and len(group) == of[axis]
        others = [{a: c for a, c in places.coordinates(run, r).items() if a != axis} for r in group]
        assert all(other == others[0] for other in others)


@pytest.mark.parametrize(("tp", "dp", "pp"), [(2, 2, 2), (4, 1, 2), (1, 4, 2)])
def test_the_order_is_that_of_torchs_device_mesh(tp, dp, pp):
    """init_device_mesh("cpu", (pp, dp, tp)): the last dimension is the innermost. techniques.three_d uses it."""
    import torch

    grid = torch.arange(pp * dp * tp).view(pp, dp, tp)
    run = lab.Training(tp=tp, dp=dp, pp=pp)
    for rank in range(run.world_size):
        at = places.coordinates(run, rank)
        assert grid[at["pp"], at["dp"], at["tp"]] == rank


def test_tensor_parallel_ranks_share_a_node_and_pipelines_do_not():
    run = lab.Training(tp=8, dp=2, pp=4)
    found = {axis: cluster("H100").group(getattr(run, axis), places.stride(run, axis)) for axis in ("tp", "dp", "pp")}
    assert found["tp"].nodes == 1 and found["dp"].nodes == 2 and found["pp"].nodes == 4
    assert found["tp"].bandwidth > 5 * found["pp"].bandwidth
    with pytest.raises(SpecError, match="rank=64"):
        places.coordinates(run, 64)
