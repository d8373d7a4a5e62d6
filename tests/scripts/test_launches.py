"""What a script starts by itself: commands that start Python or a launcher, and libraries that start ranks."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from llmlab.cli import main as cli  # noqa: E402

TRAIN = """
import os, sys, torch
import torch.distributed as dist
ranks = int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    dist.init_process_group("nccl")
print("rank", *(os.environ.get(f"{of}RANK") for of in ("", "LOCAL_", "GROUP_")), torch.cuda.current_device())
print("found", ranks, os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("SAID"), *sys.argv[1:])
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# As llamafactory-cli, swift, `axolotl train`, trl and fabric start their training.
STARTS = {
    "torchrun in a process": "subprocess.run(['torchrun', '--nproc_per_node', '2', *train], check=True, "
    "env={**os.environ, **said})",
    "python -m": "subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '2', *train], "
    "env={**os.environ, **said})",
    "another program": "os.execvpe('torchrun', ['torchrun', '--nproc_per_node=2', *train], {**os.environ, **said})",
    "accelerate.commands.launch": "from accelerate.commands.launch import launch_command, launch_command_parser\n"
    "os.environ.update(said)\n"
    "launch_command(launch_command_parser().parse_args(['--multi_gpu', '--num_processes', '2', *train]))",
    "torch.distributed.run": "os.environ.update(said); torch.distributed.run.main(['--nproc_per_node', '2', *train])",
}
HEAD = "import os, subprocess, sys, torch.distributed.run\ntrain, said = ['train.py', '--lr', '1'], {'SAID': 'yes'}\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run words in a folder with train.py; return the result, and the report where there is one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*words, body=None):
        if body is not None:
            (tmp_path / "start.py").write_text(body)
            words = (*words, "start.py")
        result = CliRunner().invoke(cli.cli, ["run", "--json", "--gpu", "A100-80GB", *words])
        return result, json.loads(result.stdout) if result.exit_code in (0, 1) else None

    return run


def command_of_a_library(folder, name, body):
    (folder / name).write_text(f"#!{sys.executable}\n{HEAD}{body}")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("start", STARTS)
def test_a_launcher_that_a_script_starts_goes_on_as_rank_0(run, start):
    if "accelerate" in start:
        pytest.importorskip("accelerate")
    result, report = run(body=HEAD + STARTS[start])
    assert "found 2 2 yes --lr 1" in result.stderr
    assert (report["world_size"], report["steps"], report["outcome"]) == (2, 3, "fits")


def test_the_command_of_a_library_may_start_python_too(run, tmp_path):
    command_of_a_library(tmp_path, "swiftly", "subprocess.run([sys.executable, 'train.py', *sys.argv[1:]], check=True)")
    result, report = run("SAID=hello", "swiftly", "sft", "--model", "m")
    assert "found 1 None hello sft --model m" in result.stderr
    assert report["steps"] == 3 and report["command"] == "swiftly sft --model m"
    command_of_a_library(tmp_path, "ends", "sys.exit(subprocess.run(['torchrun', 'gone.py']).returncode)")
    result, _ = run("ends")
    assert result.exit_code == 2 and "gone.py does not exist" in result.stderr


def test_other_processes_stay_processes(run):
    body = HEAD + "assert subprocess.check_output([sys.executable, '-c', 'print(1)']) == b'1\\n'\nimport train"
    result, report = run(body=body)
    assert report["steps"] == 3 and "found 1" in result.stderr


def test_a_launcher_behind_other_commands_of_a_shell_is_refused(run):
    """As colossalai's launcher and others start torchrun."""
    line = "cd . && export A=1; torchrun --nproc_per_node 2 train.py"
    result, _ = run(body=f"import subprocess\nsubprocess.run({line!r}, shell=True)\n")
    assert result.exit_code == 2 and "starts `torchrun --nproc_per_node 2 train.py` by a shell" in result.stderr


@pytest.mark.parametrize(
    "line", ["echo 'a; it is' && echo b", "cat <<END\nit's; done\nEND", "echo 'x && torchrun train.py'"]
)  # fmt: skip
def test_quotes_of_a_shell_are_left_to_the_shell(run, line):
    result, report = run(body=f"import subprocess\nsubprocess.run({line!r}, shell=True, check=True)\n{TRAIN}")
    assert result.exit_code == 0 and report["steps"] == 3


def test_ranks_that_contradict_world_size_are_refused(run):
    result, _ = run("--world-size", "8", body=HEAD + STARTS["torch.distributed.run"])
    assert result.exit_code == 2 and "--world-size gave 8 ranks" in result.stderr


def test_each_node_has_as_many_ranks_as_the_launcher_says(run):
    result, report = run("torchrun", "--nnodes", "2", "--nproc_per_node", "4", "--node_rank", "1", "train.py")
    assert "found 8 4" in result.stderr and report["world_size"] == 8
    assert [note["code"] for note in report["notes"]].count("rank-0-simulated") == 1
    result, _ = run("--world-size", "8", "torchrun", "--nnodes", "2", "--nproc_per_node", "2", "train.py")
    assert "found 8 8" in result.stderr


def test_another_rank_sees_its_own_gpu(run):
    words = ["torchrun", "--nnodes", "2", "--nproc_per_node", "4", "--node_rank", "1", "train.py"]
    result, report = run("--rank", "6", *words)
    assert "rank 6 2 1 2" in result.stderr and (report["rank"], report["world_size"]) == (6, 8)
    codes = [note["code"] for note in report["notes"]]
    assert "own-values" in codes and "rank-0-simulated" not in codes  # node 1's options were carried out
    body = TRAIN.replace(".cuda()", ".to(int(os.environ['LOCAL_RANK']))").replace(
        "optimizer =", "assert model.weight.device == torch.device('cuda:2') == torch.cuda.current_stream().device\n"
        "model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[2])\noptimizer =")  # fmt: skip
    assert run("--rank", "2", "--world-size", "4", body=body)[1]["steps"] == 3
    result, _ = run("--rank", "2", "--world-size", "4", body=body.replace("int(os.environ['LOCAL_RANK'])", "0"))
    assert result.exit_code == 2 and "the simulator has one GPU, cuda:2" in result.stderr
    result, _ = run("train.py")
    assert "rank None None None 0" in result.stderr  # nothing is left of the rank before


def test_a_spawned_process_has_the_rank(run):
    body = ("import torch.distributed as dist\ndef main(rank):\n"
            "    dist.init_process_group('gloo', rank=rank, world_size=4)\n    print('spawned', rank)\n"
            "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=4)\n" + TRAIN)  # fmt: skip
    assert "spawned 3" in run("--rank", "3", "--world-size", "4", body=body)[0].stderr


@pytest.mark.parametrize("words", [["--rank", "1"], ["--rank", "4", "--world-size", "4"], ["--rank", "-1"]])
def test_a_rank_that_does_not_exist_is_refused(run, words):
    result, _ = run(*words, "train.py")
    assert result.exit_code == 2 and f"--rank {words[1]}: the run has" in result.stderr


def test_a_group_that_the_script_makes_counts_with_its_ranks(run, tmp_path):
    """NCCL's buffers are outside of PyTorch's allocator, and one process has none."""
    _, alone = run("train.py")
    _, report = run("RANK=0", "WORLD_SIZE=4", "MASTER_ADDR=localhost", "MASTER_PORT=1", "python", "train.py")
    assert report["world_size"] == 4 and report["process"] - alone["process"] > 2**30


def test_gpus_that_are_visible_and_not_simulated_are_named(run):
    _, report = run("CUDA_VISIBLE_DEVICES=0,1", "python", "train.py")
    assert "one-gpu-simulated" in [note["code"] for note in report["notes"]]
    _, report = run("CUDA_VISIBLE_DEVICES=0,1", "torchrun", "--nproc_per_node=2", "train.py")
    assert "one-gpu-simulated" not in [note["code"] for note in report["notes"]]


# A library of that name whose trainer starts `devices` or `num_workers` ranks, unless its environment has them.
LIGHTNING = """
import os, torch
class Trainer:
    def __init__(self, *, accelerator="auto", devices="auto", num_nodes=1):
        print("found", os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE"), torch.cuda.device_count())
"""
DEVICES = [("4", "4 4 4"), ("[0, 3]", "2 2 2"), ("'0,1'", "2 2 2"), ("'auto'", "None None 1"), ("-1", "None None 1"),
           ("2, num_nodes=2", "4 2 2"), ("4, accelerator='cpu'", "None None 1")]  # fmt: skip


@pytest.mark.parametrize(("devices", "found"), DEVICES)
def test_lightnings_devices_are_ranks(run, tmp_path, devices, found):
    if find_spec("pytorch_lightning"):
        pytest.skip("pytorch_lightning is installed, and this is a stand-in for it")
    (tmp_path / "pytorch_lightning" / "trainer").mkdir(parents=True)
    for name in ("__init__", "trainer/__init__"):
        (tmp_path / "pytorch_lightning" / f"{name}.py").write_text("")
    (tmp_path / "pytorch_lightning" / "trainer" / "trainer.py").write_text(LIGHTNING)
    body = f"from pytorch_lightning.trainer.trainer import Trainer\nTrainer(devices={devices})"
    try:
        result, _ = run(body=body)
    finally:
        for name in [each for each in sys.modules if each.startswith("pytorch_lightning")]:
            del sys.modules[name]
    assert f"found {found}" in result.stderr


RAY = """
import torch, ray.train.torch
from ray.train import ScalingConfig
def loop(config):
    context = ray.train.get_context()
    print("found", context.get_world_rank(), context.get_world_size())
    model = ray.train.torch.prepare_model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model(torch.randn(4, 64, device=ray.train.torch.get_device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
scaling = ScalingConfig(num_workers=4, use_gpu=True)
ray.train.torch.TorchTrainer(loop, train_loop_config={}, scaling_config=scaling).fit()
"""


def test_rays_workers_are_ranks(run):
    pytest.importorskip("ray")
    result, report = run(body=RAY)
    assert "found 0 4" in result.stderr and (report["world_size"], report["steps"]) == (4, 3)


def test_a_function_that_elastic_launch_starts_runs_as_rank_0(run):
    body = """
import runpy
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
def train(words):
    sys.argv[1:] = words
    runpy.run_path("train.py")
print(elastic_launch(LaunchConfig(2, 2, 4, rdzv_backend="c10d"), train)(["--lr", "1"]))
"""
    result, report = run(body=HEAD + body)
    assert "found 8 4 None --lr 1\n{0: None}" in result.stderr and report["world_size"] == 8


def test_accelerate_s_notebook_launcher_starts_ranks(tmp_path):
    """In a process of its own, because accelerate refuses one in which anything has used its states."""
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "start.py").write_text("""
import runpy
from accelerate import notebook_launcher
notebook_launcher(lambda: runpy.run_path("train.py"), num_processes=4)
""")
    words = [sys.executable, "-m", "llmlab", "run", "--json", "--gpu", "A100-80GB", "start.py"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    report = json.loads(result.stdout)
    assert "found 4 4" in result.stderr and report["world_size"] == 4 and report["steps"] == 3


@pytest.mark.parametrize(("words", "said"), [
    (["accelerate", "launch", "train.py"], "accelerate.commands.launch cannot be imported: No module named 'nowhere'"),
    (["uses.py"], "No module named 'nowhere': install that package beside llmlab"),
])  # fmt: skip
def test_a_library_whose_import_fails_halfway_is_refused_in_a_line(tmp_path, words, said):
    """As boto3 without botocore, which accelerate imports if it is there. In a process that has not imported it."""
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "uses.py").write_text("import accelerate\n")
    (tmp_path / "boto3.py").write_text("import nowhere\n")
    (tmp_path / "boto3-1.0.dist-info").mkdir()
    (tmp_path / "boto3-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: boto3\nVersion: 1.0\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "llmlab", "run", "--gpu", "T4", *words]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"llmlab: {said}"), done.stderr
    assert "Traceback" not in done.stderr
