"""Which rank is where, and which mesh is the fastest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.formulas.time import mesh
from llmlab.formulas.time.distributed import step
from llmlab.hardware.links import cluster
from llmlab.specs import mesh as places

degrees = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in places.AXES})
SMALL = {"seq_len": 2048, "precision": "mixed-bf16"}


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


@pytest.fixture(scope="module")
def choices():
    return mesh.search("meta-llama/Llama-3.1-8B", "H100", 16, 64, **SMALL)


def test_every_mesh_trains_the_batch_on_all_devices(choices):
    for choice in choices:
        run = choice.run
        assert run.world_size == 16 and run.global_batch == 64
        assert choice.seconds == step("meta-llama/Llama-3.1-8B", run, "H100", cluster("H100")).seconds
    fits = [choice.fits for choice in choices]
    assert fits == sorted(fits, reverse=True)
    assert [c.seconds for c in choices if c.fits] == sorted(c.seconds for c in choices if c.fits)
    shapes = {(c.run.tp, c.run.pp, c.run.dp) for c in choices}
    assert {(1, 1, 16), (8, 1, 2), (2, 8, 1), (8, 2, 1)} <= shapes and not any(tp == 16 for tp, _, _ in shapes)


def test_peak_is_that_of_the_fullest_stage(choices):
    from llmlab.formulas.memory.moments import training_moments

    spec, card = lab.model("meta-llama/Llama-3.1-8B"), lab.gpu("H100")
    for choice in choices[:: len(choices) // 12]:
        every = [training_moments(spec, choice.run, card, False, stage) for stage in range(choice.run.pp)]
        assert choice.peak == max(moment.total for moments in every for moment in moments)


def test_a_slow_network_keeps_talk_inside_nodes():
    """One 25 Gbit/s adapter a node: gradients are too many bytes, a pipeline's sends are not."""
    settings = {"seq_len": 4096, "precision": "mixed-bf16"}
    fast = mesh.search("meta-llama/Llama-3.1-8B", "H100", 32, 128, **settings)[0].run
    slow = cluster("H100", "Ethernet-25", adapters=1)
    forced = mesh.search("meta-llama/Llama-3.1-8B", "H100", 32, 128, slow, **settings)[0].run
    assert forced.pp > fast.pp and forced.dp < fast.dp


def test_nothing_to_try():
    with pytest.raises(SpecError, match="no mesh of 37 devices"):
        mesh.search("meta-llama/Llama-3.1-8B", "H100", 37, 5, **SMALL)
