"""`llmlab run`: small training scripts as people write them, through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import llmlab as lab  # noqa: E402
from llmlab.cli import main as cli  # noqa: E402

MODEL = """
import os, sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step():
    x = torch.randn(64, 256, device="cuda")
    loss = (model(x) - x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    return loss
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script into the working directory, after the model; return its name."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)

    def write(body, head=MODEL):
        (home / "train.py").write_text(head + body)
        return "train.py"

    return write


def run(*words):
    return CliRunner().invoke(cli.cli, ["run", *map(str, words)])


def answer(*words):
    result = run("--json", *words)
    assert result.exit_code in (0, 1), (result.stderr, result.exception)
    return json.loads(result.stdout)


def test_the_peaks_are_those_of_the_simulator_and_the_parts_add_up(script):
    name = script("for i in range(3): step()")
    found = answer("--gpu", "T4", name)
    program = f"import llmlab as lab\nwith lab.simulator('T4') as sim:\n    exec(open({name!r}).read())\n"
    program += "print(sim.peak_allocated, sim.peak_reserved)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(found["peak_allocated"]), str(found["peak_reserved"])]
    assert sum(found["by_category"].values()) == found["peak_allocated"]
    assert sum(sum(sizes.values()) for sizes in found["by_module"].values()) == found["peak_allocated"]
    assert (found["outcome"], found["steps"], found["ended"]) == ("fits", 3, "ran to its end")
    card = lab.gpu("T4")
    assert found["process"] == found["peak_reserved"] + card.outside()
    assert found["step_seconds"] > 0


@pytest.mark.parametrize(
    "loop",
    [
        "while True: step()",
        "while True:\n    try: step()\n    except Exception: pass",
        "from itertools import count\nfor _ in count(): step()",
        "try:\n    while True: step()\nexcept: step()",
    ],
)
def test_steps_end_any_loop(script, loop):
    found = answer("--gpu", "A100-40GB", "--steps", 2, script(loop))
    assert found["ended"] == f"was ended after {found['steps']} optimizer steps" and found["steps"] in (2, 3)


def test_a_script_gets_its_arguments_and_modules_beside_it(script):
    Path("helper.py").write_text("HIDDEN = 3")
    name = script("import helper\nassert sys.argv == ['train.py', '--json', '--gpu', 'x'], sys.argv\nstep()")
    assert answer("--gpu", "A100-40GB", name, "--json", "--gpu", "x")["command"] == "train.py --json --gpu x"


def test_its_output_makes_room_for_json(script):
    name = script("print('loss', step().item())")
    assert "loss ?" in run("--gpu", "A100-40GB", name).stdout
    result = run("--gpu", "A100-40GB", "--json", name)
    assert json.loads(result.stdout)["steps"] == 1 and "loss ?" in result.stderr


def test_files_are_thrown_away_or_kept(script, tmp_path):
    body = "step(); os.makedirs('out'); open('out/log', 'w').write('x'); torch.save(model.state_dict(), 'out/model.pt')"
    name = script(body + "; assert os.path.exists('out/model.pt'); model.load_state_dict(torch.load('out/model.pt'))")
    answer("--gpu", "A100-40GB", name)
    assert os.listdir(".") == ["train.py"]
    answer("--gpu", "A100-40GB", "--out", tmp_path / "kept", name)
    assert os.listdir(".") == ["train.py"]
    assert [path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()] == ["log"]


def test_what_does_not_fit_says_where_and_what_it_would_have_taken(script):
    name = script("for _ in range(3): step()\nbig = torch.empty(17 << 30, dtype=torch.uint8, device='cuda')\nstep()")
    result = run("--json", "--gpu", "T4", name)
    found = json.loads(result.stdout)
    assert (result.exit_code, found["outcome"], found["steps"]) == (1, "out of memory", 3)
    assert found["where"].startswith("empty.memory_format: ")
    assert 17 << 30 < found["needed"] < 18 << 30 and found["peak_allocated"] < 1 << 30


def test_one_that_ends_itself_for_want_of_memory_does_not_fit(script):
    big = "torch.empty(50 << 30, dtype=torch.uint8, device='cuda')"
    name = script(f"try: {big}\nexcept torch.OutOfMemoryError: sys.exit(1)")
    result = run("--json", "--gpu", "A100-40GB", name)
    found = json.loads(result.stdout)
    assert (result.exit_code, found["outcome"]) == (1, "out of memory")
    assert 50 << 30 <= found["needed"] < 51 << 30  # also of a card whose context nobody measured


def test_a_limit_is_of_the_whole_process(script):
    name = script("step()")
    taken = answer("--gpu", "T4", name)["process"] / 2**30
    assert run("--gpu", "T4", "--max-gib", taken + 0.001, name).exit_code == 0
    result = run("--gpu", "T4", "--max-gib", taken - 0.001, "--json", name)
    assert result.exit_code == 1 and json.loads(result.stdout)["needed"] == round(taken * 2**30)


def test_one_that_catches_the_error_goes_on_and_is_told_of(script):
    body = "try: torch.empty(17 << 30, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass\nstep()"
    found = answer("--gpu", "T4", script(body))
    assert found["outcome"] == "fits" and any("caught" in note for note in found["notes"])


def test_one_that_fails_by_itself_shows_its_own_lines_only(script):
    result = run("--gpu", "T4", script("def inner():\n    return 1 / 0\ninner()"))
    assert result.exit_code == 2 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-2:] == [
        "ZeroDivisionError: division by zero", "llmlab: the script failed by itself",
    ]  # fmt: skip
    assert [line for line in lines if "File" in line and "train.py" not in line] == []


def test_a_compiled_script_has_no_time(script):
    found = answer("--gpu", "A100-40GB", script(
        "torch.compile(lambda x: x.exp() + 1)(torch.ones(8, device='cuda')); model.compile(); step()"
    ))  # fmt: skip
    assert any("Triton's kernels were launched" in note for note in found["notes"])
    assert found["step_seconds"] is None


def test_exit_codes_of_its_own(script):
    assert answer("--gpu", "T4", script("step(); sys.exit(0)"))["ended"] == "ran to its end"
    result = run("--gpu", "T4", script("step(); sys.exit(3)"))
    assert result.exit_code == 2 and "sys.exit(3)" in result.stderr


def test_an_interrupt_shows_the_peak_so_far(script):
    result = run("--gpu", "A100-40GB", "--json", script("step(); raise KeyboardInterrupt"))
    found = json.loads(result.stdout)
    assert (result.exit_code, found["outcome"], found["steps"]) == (2, "unknown", 1)
    assert found["ended"] == "was interrupted" and found["peak_allocated"] > 0


def test_what_is_not_simulated_is_one_line(script):
    result = run("--gpu", "T4", script("torch.randn(4, device='cuda').nonzero()"))
    assert result.exit_code == 2 and "(train.py, line 11)" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_launcher_or_an_option_says_the_ranks(script):
    body = "import torch.distributed as dist\ndist.init_process_group('nccl')\nprint(dist.get_world_size())\nstep()"
    name = script(body)
    assert answer("--gpu", "A100-40GB", "torchrun", "--nproc_per_node", 4, name)["world_size"] == 4
    result = run("--gpu", "A100-40GB", "--nodes", 2, name)
    assert result.exit_code == 0 and result.stdout.startswith("16\n") and "rank 0 of 16" in result.stdout


def test_a_snapshot_and_a_picture(script, tmp_path):
    pytest.importorskip("matplotlib")
    snapshot, picture = tmp_path / "run.pickle", tmp_path / "run.png"
    answer("--gpu", "A100-40GB", "--snapshot", snapshot, "--timeline", picture, script("step()"))
    assert snapshot.stat().st_size > 1000 and picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "nowhere.py is not there"),
        ([], "no script"),
        (["--gpu", "T5", "train.py"], "unknown GPU"),
        (["--steps", "0", "train.py"], "steps=0 is not a whole number"),
        (["--max-gib", "-1", "train.py"], "a limit of"),
        (["--max-gib", "99", "train.py"], "a limit of 99.00 GiB"),
        (["--world-size", "2", "--nodes", "2", "train.py"], "--world-size beside"),
    ],
)
def test_bad_input_is_one_line(script, words, said):
    script("step()")
    result = run("--gpu", "T4", *words)
    assert result.exit_code == 2 and result.stdout == "" and said in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1
