"""One script under every launcher; a run that was killed and resumed gives the losses of one that was not."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from llmlab.base.errors import NotAvailable, SpecError
from llmlab.course.experiments import checkpoints, launchers
from llmlab.course.experiments.cluster import Place, Saving, main, make_job, place, train
from llmlab.course.techniques.resume import SEQUENCES_OF_THE_TEXT, Order, last_whole
from llmlab.ranks.launch import launch

# ---- where a process is, and what it trains


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, Place(0, 0, 1, 1)),
        ({"SLURM_NTASKS": "1"}, Place(0, 0, 1, 1)),
        ({"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}, Place(9, 1, 32, 8)),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, Place(1, 1, 2, 2)),  # deepspeed's
        ({"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "SLURM_NTASKS": "2"}, Place(1, 0, 2, 1)),  # torchrun's
    ],
)
def test_a_process_is_where_its_launcher_says(said, found):
    assert place(said) == found


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"RANK": "1"}, "RANK=1: a launcher sets RANK, LOCAL_RANK and WORLD_SIZE"),
        ({"RANK": "one", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK=one"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK=2, LOCAL_RANK=0, WORLD_SIZE=2"),
        ({"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK <= RANK"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "3"}, "SLURM_NTASKS=4 and no RANK"),
    ],
)
def test_a_wrong_environment_is_refused_before_anything_is_joined(said, words, monkeypatch, capsys):
    with pytest.raises(SpecError, match=re.escape(words)):
        place(said)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", None)  # whoever gets here raises TypeError
    monkeypatch.setattr("llmlab.course.experiments.cluster.place", lambda: place(said))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2 and words in capsys.readouterr().err


@given(ranks=st.sampled_from([1, 2, 4, 8, 16, 32]), micro_batch=st.sampled_from([1, 2, 4]))
def test_the_batch_is_the_same_on_any_number_of_ranks(ranks, micro_batch):
    run = make_job(ranks, sequences=128, micro_batch=micro_batch).run
    assert run.global_batch == 128 and run.world_size == ranks
    if ranks > 1:
        config = run.to_deepspeed()
        assert config["train_batch_size"] == 128
        assert config["gradient_accumulation_steps"] == 128 // (micro_batch * ranks)
        assert run.to_accelerate()["num_processes"] == ranks


@pytest.mark.parametrize(
    ("wrong", "ranks", "words"),
    [
        ({}, 8, "sequences=8 are not a multiple of micro_batch=2 × 8 ranks"),
        ({"steps": 0}, 1, "steps=0"),
    ],
)
def test_what_cannot_be_trained_is_refused(wrong, ranks, words):
    with pytest.raises(SpecError, match=re.escape(words)):
        make_job(ranks, **wrong)


@pytest.mark.parametrize(
    ("wrong", "words"), [({"every": True}, "save_every=True"), ({"kill": "1"}, "kill='1' is not RANK:STEP")]
)
def test_what_cannot_be_saved_is_refused(wrong, words):
    with pytest.raises(SpecError, match=re.escape(words)):
        Saving(**wrong)


def test_an_epoch_has_each_sequence_once_in_an_order_of_its_own():
    order = Order(seed=0)
    epochs = [[order.next() for _ in range(SEQUENCES_OF_THE_TEXT)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(SEQUENCES_OF_THE_TEXT))
    assert epochs[0] != epochs[1]
    again = Order(seed=0)
    again.load_state_dict({"epoch": 1, "position": 7})
    assert again.next() == epochs[1][7]


# ---- resuming, on one rank and on two

ALL = ("model", "optimizer", "schedule", "order", "generators")


def alone(saving, **options):
    """Train in this process, on one rank; return the losses."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return train(make_job(1), Place(), torch.device("cpu"), saving, **options)["losses"]
    finally:
        dist.destroy_process_group()


def in_two_ranks(folder):
    """Run in each rank: whole runs with and without dropout, one resumed from one rank's checkpoint, and accidents."""
    here, cpu, folder = place(), torch.device("cpu"), Path(folder)
    return {
        "whole": train(make_job(2), here, cpu)["losses"],
        "without dropout": train(make_job(2), here, cpu, Saving(str(folder / "two")), dropout=0.0)["losses"],
        "grown": train(make_job(2), here, cpu, Saving(str(folder / "one")), dropout=0.0),
        "accidents": checkpoints.chapter(str(folder)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder):
    """Losses of one rank; its folder then has the checkpoint after 4 steps alone."""
    return alone(Saving(str(folder / "one")), dropout=0.0), forget(folder / "one")


@pytest.fixture(scope="module")
def two(folder, one):
    return launch(in_two_ranks, 2, str(folder), patience=60)[0]


def forget(folder):
    """Remove the last checkpoint, so that a run resumes at the one before."""
    last = last_whole(folder)
    last.rename(last.with_suffix(".gone"))


@pytest.mark.parametrize("part", ALL)
def test_without_any_one_part_the_run_goes_on_otherwise(part, tmp_path):
    saving = Saving(str(tmp_path))
    whole = alone(saving)
    forget(tmp_path)
    resumed = alone(saving, leave_out=(part,))
    assert resumed[:4] == whole[:4], "those are in the checkpoint"
    assert resumed[4:] != whole[4:]


def test_with_all_parts_it_goes_on_bit_for_bit(tmp_path):
    saving = Saving(str(tmp_path))
    whole = alone(saving)
    forget(tmp_path)
    assert alone(saving) == whole


def test_on_more_ranks_than_saved(one, two):
    """Two ranks each load their half of what one rank saved."""
    assert two["grown"]["resumed"] == 4
    assert two["grown"]["losses"] == pytest.approx(one[0], abs=1e-5)


def test_on_fewer_ranks_than_saved(two, folder):
    forget(folder / "two")
    losses = alone(Saving(str(folder / "two")), dropout=0.0, leave_out=("generators",))  # as resume itself
    assert losses[:4] == two["without dropout"][:4]
    assert losses == pytest.approx(two["without dropout"], abs=1e-5)


def test_a_save_over_another_checkpoint_can_leave_a_mixture_that_loads(two):
    """What DCP writes last, .metadata, is already there: so a checkpoint has a folder of its own here."""
    assert two["accidents"] == {
        "in a fresh folder": "refused",
        "over another": [2.0, 2.0, 1.0, 1.0],
        "while training went on": [1.0, 1.0, 1.0, 1.0],
        "raised": True,
    }


# ---- killed, by real launchers


@pytest.fixture(scope="module")
def killed(folder):
    """A torchrun whose rank 1 dies while it saves; what is left of it, and what it said."""
    with pytest.raises(RuntimeError) as ended:
        launchers.run("torchrun", "--folder", str(folder / "killed"), "--kill", "1:8:save")
    # None: of what ended meanwhile, and of zombies, of which other tests beside this one have some.
    running = psutil.process_iter(["cmdline"])
    ours = [each for each in running if str(folder / "killed") in " ".join(each.info["cmdline"] or ())]
    return str(ended.value), ours, sorted(path.name for path in (folder / "killed").iterdir())


def test_a_rank_that_dies_ends_the_launch_and_is_named(killed):
    said, left, _ = killed
    assert left == []
    assert re.search(r"exitcode\s*: -9", said) and re.search(r"rank\s*: 1", said)


def test_a_checkpoint_that_was_not_finished_is_not_taken_for_one(killed, folder):
    assert killed[2] == ["step-000004", "step-000008.unfinished"]
    unfinished = {path.name for path in (folder / "killed" / "step-000008.unfinished").iterdir()}
    assert "__1_0.distcp" in unfinished and ".metadata" not in unfinished, "it died with its own shards written"
    assert last_whole(folder / "killed").name == "step-000004"


def test_the_highest_step_is_the_last(tmp_path):
    for name in ("step-000008", "step-999999", "step-1000000", "step-2000000.unfinished"):
        (tmp_path / name).mkdir()
    assert last_whole(tmp_path).name == "step-1000000"


def stub(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def batch(folder, tmp_path, **more):
    """Run the batch file's body as Slurm does, on one node: srun starts a task, scontrol names the node."""
    stub(tmp_path, "scontrol", "echo localhost")
    stub(tmp_path, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    given = launchers.environment()
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    environment = {**given, **slurm, "SLURM_JOB_ID": str(os.getpid()), "PATH": f"{tmp_path}:{given['PATH']}", **more}
    command = ["bash", str(launchers.BATCH_FILE), "--folder", str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


def test_the_batch_file_resumes_what_was_killed_bit_for_bit(killed, two, folder, tmp_path):
    done = batch(folder / "killed", tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    data = json.loads(line)
    assert data["resumed"] == 4 and data["ranks"] == 2
    assert data["losses"] == two["whole"], "other processes, another launcher, two lives: the same bits"
    assert last_whole(folder / "killed").name == "step-000008"


def test_the_batch_file_tries_three_times_each_at_a_place_of_its_own(tmp_path):
    stub(tmp_path, "torchrun", f'echo "$@" >> {tmp_path}/tried; exit 1')
    assert batch(tmp_path, tmp_path, SLURM_JOB_ID="123456").returncode == 1
    tried = (tmp_path / "tried").read_text().splitlines()
    for option in (r"--rdzv-endpoint localhost:(\d+)", r"--rdzv-id (\S+)"):
        assert len({re.search(option, line)[1] for line in tried}) == 3
    assert all("--nnodes 1 --nproc-per-node 2" in line and f"--folder {tmp_path}" in line for line in tried)
    assert subprocess.run(["bash", "-n", launchers.BATCH_FILE]).returncode == 0


def test_workers_in_sessions_of_their_own_end_with_their_launcher():
    """torchrun's are: killing its process group leaves them."""
    worker = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}], start_new_session=True)"
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with launcher.stdout as said:
        process = psutil.Process(int(said.readline()))
    launchers.end(launcher)
    assert launcher.returncode == -signal.SIGKILL
    _, left = psutil.wait_procs([process], timeout=60)  # it is nobody's child now, and may never be reaped
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in left)


def test_a_launcher_that_takes_longer_than_its_limit_is_ended_and_named(monkeypatch):
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(launchers, "commands", lambda *_: [hangs, hangs])
    with pytest.raises(RuntimeError, match=r"torchrun is not done after limit=0\.1 s"):
        launchers.run("torchrun", limit=0.1)
    assert hangs not in [child.cmdline() for child in psutil.Process().children()]


def test_a_node_that_fails_ends_the_other(monkeypatch):
    fails, hangs = ([sys.executable, "-c", f"import sys, time; {code}"] for code in ("sys.exit(7)", "time.sleep(600)"))
    for nodes in ([fails, hangs], [hangs, fails]):
        monkeypatch.setattr(launchers, "commands", lambda *_, nodes=nodes: nodes)
        with pytest.raises(RuntimeError, match=r"ended with \[(7, None|None, 7)\]"):
            launchers.run("torchrun, 2 nodes", limit=600)
        assert hangs not in [child.cmdline() for child in psutil.Process().children()]


def test_launchers_that_are_not_there_are_named(monkeypatch):
    with pytest.raises(SpecError, match=r"launcher='mpirun' is not one of python, torchrun"):
        launchers.run("mpirun")
    monkeypatch.setattr(launchers, "commands", lambda *_: [["no-such-launcher"]])
    with pytest.raises(NotAvailable, match="deepspeed is not installed"):
        launchers.run("deepspeed")


def test_torch_reads_local_rank_and_not_nccl_timeout():
    assert launchers.readers("LOCAL_RANK", "torch", "no_such_package") == ["torch"]
    assert launchers.readers("NCCL_TIMEOUT", "torch") == []
