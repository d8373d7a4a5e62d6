"""Which rank is where, and which mesh is the fastest."""

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.formulas.time import mesh
from llmlab.formulas.time.distributed import step
from llmlab.hardware.links import cluster

SMALL = {"seq_len": 2048, "precision": "mixed-bf16"}


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
