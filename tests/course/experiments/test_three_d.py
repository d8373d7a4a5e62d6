"""A mesh of ranks trains what one process trains."""

import json

import pytest

from llmlab.base.errors import SpecError
from llmlab.course.experiments.job import Job, tiny_llama
from llmlab.course.experiments.train import check, main, make_job, run_job, train
from llmlab.ranks.launch import launch
from llmlab.specs.run import Training

STEPS = 3


def of_all(jobs):
    return [train(job) for job in jobs]


@pytest.fixture(scope="module")
def alone():
    return run_job(Job("tensor_parallel", Training(micro_batch=8, seq_len=64), steps=STEPS))


@pytest.fixture(scope="module")
def meshes():
    """One launch of four ranks for all meshes: starting processes is what takes long."""
    jobs = {
        (tp, pp): make_job("three_d", 4, 8, tp=tp, pp=pp, micro_batches=2, steps=STEPS)
        for tp, pp in ((2, 2), (2, 1), (1, 2), (1, 1), (1, 4))
    }
    ranks = launch(of_all, 4, list(jobs.values()))
    return {degrees: [rank[i] for rank in ranks] for i, degrees in enumerate(jobs)}


def test_losses_are_those_of_one_process(meshes, alone):
    for ranks in meshes.values():
        assert ranks[-1]["losses"] == pytest.approx(alone["losses"], abs=2e-5)
    tensor_and_pipeline = meshes[2, 2]
    assert tensor_and_pipeline[0]["losses"] == [None] * STEPS  # the first stage sees no loss
    assert all(rank["losses"] == pytest.approx(alone["losses"], abs=2e-5) for rank in meshes[2, 1])


def test_eight_ranks_two_along_each_axis_train_what_one_process_trains(alone):
    found = run_job(make_job("three_d", 8, 8, tp=2, pp=2, micro_batches=2, steps=STEPS))
    assert found["mesh"] == {"pp": 2, "dp": 2, "tp": 2}
    assert sorted(map(tuple, found["places"])) == [(p, d, t) for p in (0, 1) for d in (0, 1) for t in (0, 1)]
    assert found["losses"] == pytest.approx(alone["losses"], abs=2e-5)
    held = [rank["parameters"] for rank in found["bytes"]]
    assert held[0] == held[1] == held[2] == held[3] and sum(held) < 2 * 1.1 * found["whole"]["parameters"]


def test_places_are_megatrons(meshes):
    from llmlab.specs.mesh import coordinates

    for (tp, pp), ranks in meshes.items():
        run = Training(tp=tp, pp=pp, dp=4 // (tp * pp))
        for rank, found in enumerate(ranks):
            at = coordinates(run, rank)
            assert found["place"] == [at["pp"], at["dp"], at["tp"]]


def test_ranks_hold_their_share(meshes):
    spec = tiny_llama()
    norms = 2 * spec.layers * spec.hidden + spec.hidden
    whole = 4 * spec.parameters
    for (tp, pp), ranks in meshes.items():
        held = sum(rank["bytes"]["parameters"] for rank in ranks) // (4 // (tp * pp))
        assert held == whole + 4 * (tp - 1) * norms  # norms are whole on every tensor-parallel rank
        assert all(rank["bytes"]["optimizer"] == 2 * rank["bytes"]["gradients"] for rank in ranks)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 6}, "ranks=6 cannot be dp × tp=2 × pp=2; give ranks a multiple of 4"),
        ({"ranks": 3, "tp": 3, "pp": 1}, "tp=3 does not divide heads=8 .*dp=1 × tp=3 × pp=1"),
        ({"ranks": 10, "pp": 5}, "pp=5 leaves a stage .*dp=1 × tp=2 × pp=5"),
        ({"sequences": 6}, "dp=1 × micro_batches=4 does not divide sequences=6"),
        ({"tp": 0}, "tp=0 is not a whole number >= 1"),
        ({"tp": -1, "pp": -1}, "tp=-1 is not a whole number >= 1"),
    ],
)
def test_what_cannot_be_a_mesh_is_refused_before_any_process_starts(changes, words):
    with pytest.raises(SpecError, match=words):
        check(
            make_job(
                **{"experiment": "three_d", "ranks": 4, "sequences": 8, "micro_batches": 4, "tp": 2, "pp": 2, **changes}
            )
        )


def test_the_command_line(capsys):
    # Stages of 1, 2 and 1 layers.
    main(["--ranks", "3", "--tp", "1", "--pp", "3", "--steps", "1", "--json"], "three_d")
    data = json.loads(capsys.readouterr().out)
    assert data["mesh"] == {"pp": 3, "dp": 1, "tp": 1} and len(data["losses"]) == 1
    assert data["bytes"][1]["parameters"] > data["bytes"][0]["parameters"]
    with pytest.raises(SystemExit) as left:
        main(["--ranks", "3"], "three_d")
    assert left.value.code == 2 and "multiple of 4" in capsys.readouterr().err
