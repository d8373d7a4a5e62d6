"""One script of Hugging Face's Trainer: DeepSpeed's stages give the same losses, in ranks and under a launcher."""

import json
import os
from contextlib import redirect_stdout

import pytest

from llmlab.course.experiments.hf_trainer import main, train
from llmlab.course.experiments.job import tiny_gpt
from llmlab.course.experiments.launchers import free_port
from llmlab.ranks.launch import launch, new_process

pytest.importorskip("deepspeed", reason="the distributed extra")

PARAMETERS = 4 * tiny_gpt().parameters  # bytes
STEPS = 2


def every_stage():
    """Run in each rank."""
    return {str(stage): train(stage, STEPS) for stage in (1, 2, 3)}


def script(place, log):
    """Run in each rank that a launcher starts."""
    os.environ.update(place)
    with log.open("w") as said, redirect_stdout(said):
        main(["--stage", "1", "--steps", str(STEPS), f"--local_rank={place['LOCAL_RANK']}"])


def started(folder):
    """Return what rank 0 prints where both ranks are told what DeepSpeed's launcher tells them."""
    both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
            "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    ranks = []
    try:
        for rank in ("0", "1"):
            place = {**both, "RANK": rank, "LOCAL_RANK": rank}
            ranks.append(new_process(script, (place, folder / f"{rank}.log"), f"rank {rank}"))
            ranks[-1].start()
        for rank in ranks:
            rank.join(600)
            assert rank.exitcode == 0, f"{rank.name}: its error is above"
    finally:
        for rank in ranks:
            rank.kill()
    (line,) = [line for line in (folder / "0.log").read_text().splitlines() if line.startswith('[{"rank"')]
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


def test_a_launcher_starts_the_same_script(in_ranks, tmp_path):
    """The capstone's test starts DeepSpeed's launcher itself, and chapter 17 all of them."""
    held_to(in_ranks[0]["3"]["losses"], started(tmp_path), 1)
