"""One script of Hugging Face's Trainer: DeepSpeed's stages give the same losses, in ranks and under a launcher."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmlab.course.experiments.hf_trainer import train
from llmlab.course.experiments.job import tiny_gpt
from llmlab.course.experiments.launchers import free_port
from llmlab.ranks.launch import launch

pytest.importorskip("deepspeed", reason="the distributed extra")

PARAMETERS = 4 * tiny_gpt().parameters  # bytes
BIN = Path(sys.executable).parent
SCRIPT = "llmlab.course.experiments.hf_trainer"
STEPS = 2


def every_stage():
    """Run in each rank."""
    return {str(stage): train(stage, STEPS) for stage in (1, 2, 3)}


def by_deepspeed(stage):
    """Return what the ranks of DeepSpeed's launcher printed; end all that it started, whatever happens."""
    command = ["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port()), "--module", SCRIPT]
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",  # it looks for python there
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = subprocess.Popen(
        [BIN / command[0], *command[1:], "--stage", str(stage), "--steps", str(STEPS)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, error = process.communicate(timeout=900)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, error[-20000:]
    (line,) = [line for line in out.splitlines() if line.startswith('[{"rank"')]
    return json.loads(line)


@pytest.fixture(scope="module")
def in_ranks():
    return launch(every_stage, 2, patience=60)


def held_to(losses, ranks, stage):
    assert [(rank["rank"], rank["world"]) for rank in ranks] == [(0, 2), (1, 2)]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, abs=2e-5), "neither stage nor launcher changes them"
        assert rank["parameters"] == (PARAMETERS // 2 if stage == 3 else PARAMETERS)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_gives_the_same_losses(in_ranks, stage):
    losses = in_ranks[0]["3"]["losses"]
    assert losses[1] < losses[0] < 6.1, "ln 384 is 5.95"
    held_to(losses, [rank[str(stage)] for rank in in_ranks], stage)


def test_a_launcher_runs_the_same_script(in_ranks):
    """DeepSpeed's own. Chapter 17 has the others start a script, and they say the same in the environment."""
    held_to(in_ranks[0]["3"]["losses"], by_deepspeed(1), 1)
