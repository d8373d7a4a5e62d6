"""`python -m llmlab.course.experiments NAME` reaches each program, with its options."""

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.course.experiments.__main__ import MODULES, main
from llmlab.course.experiments.job import FIELDS, Job


@pytest.mark.parametrize("name", MODULES)
def test_each_name_has_a_program_that_says_its_options(name, capsys):
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    output = capsys.readouterr().out
    assert done.value.code == 0 and name in output.splitlines()[0] and "--steps" in output


def test_an_unknown_name_is_refused_with_those_that_are_known(capsys):
    with pytest.raises(SystemExit) as done:
        main(["zerro"])
    assert done.value.code == 2 and "'zerro' is not one of data_parallel, zero" in capsys.readouterr().err
    main(["--help"])
    assert "hf_trainer" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_script_for_launchers_says_so_without_one(stage, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as done:
        main(["hf_trainer", "--stage", stage])
    errors = capsys.readouterr().err
    assert done.value.code == 2 and errors.count("\n") == 1
    assert f"stage={stage} without a launcher" in errors and "torchrun --nproc-per-node 2 -m" in errors


@pytest.mark.parametrize("experiment", FIELDS)
def test_what_an_experiment_would_not_heed_is_refused(experiment):
    with pytest.raises(SpecError, match=f"{experiment} reads micro_batch, seq_len, .*; drop checkpointing='full'"):
        Job(experiment, lab.Training(seq_len=64, checkpointing="full"))


def test_an_experiment_that_is_none_is_refused():
    with pytest.raises(SpecError, match="experiment='zerro' is not one of data_parallel"):
        Job("zerro", lab.Training(seq_len=64))
