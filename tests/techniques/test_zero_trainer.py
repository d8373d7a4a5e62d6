"""One script of Hugging Face's Trainer, with DeepSpeed's stages, under three launchers: the same losses."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmlab.techniques.rank_training import tiny_gpt

pytest.importorskip("deepspeed", reason="the distributed extra")

PARAMETERS = 4 * tiny_gpt().parameters  # bytes
BIN = Path(sys.executable).parent
SCRIPT = "llmlab.techniques.zero_trainer"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def commands():
    accelerate = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    return {
        "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", free_port(), "-m", SCRIPT],
        "accelerate": ["accelerate", "launch", *accelerate.split(), "--main_process_port", free_port(), "-m", SCRIPT],
        "deepspeed": ["deepspeed", "--num_accelerators", "2", "--master_port", free_port(), "--module", SCRIPT],
    }


def run(launcher, stage):
    """Return what the ranks printed; end all that the launcher started, whatever happens."""
    name, *arguments = commands()[launcher]
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"  # deepspeed looks for python there
    environment = {
        **os.environ,
        "PATH": path,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = subprocess.Popen(
        [str(BIN / name), *arguments, "--stage", str(stage), "--steps", "2"],
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


STAGES = {"torchrun": 3, "accelerate": 2, "deepspeed": 1}


@pytest.fixture(scope="module")
def found():
    return {launcher: run(launcher, stage) for launcher, stage in STAGES.items()}


@pytest.mark.parametrize("launcher", STAGES)
def test_every_launcher_runs_the_same_script(found, launcher):
    ranks, losses = found[launcher], found["torchrun"][0]["losses"]
    assert [(rank["rank"], rank["world"]) for rank in ranks] == [(0, 2), (1, 2)]
    assert losses[1] < losses[0] < 6.1, "ln 384 is 5.95"
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, abs=2e-5), "neither stage nor launcher changes them"
        assert rank["parameters"] == (PARAMETERS // 2 if STAGES[launcher] == 3 else PARAMETERS)
