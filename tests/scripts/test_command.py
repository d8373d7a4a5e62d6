"""Command lines of scripts: what runs, with which arguments, as how many ranks."""

import pytest

from llmlab.base.errors import SpecError
from llmlab.scripts.command import Command, command


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def test_a_script_keeps_its_arguments_as_they_are(here):
    assert command(["train.py", "--steps", "3", "--json"]) == Command("train.py", ("--steps", "3", "--json"))
    assert command(["python", "-u", "train.py", "-u"]) == Command("train.py", ("-u",))
    assert command(["-m", "package.train", "a"]) == Command("package.train", ("a",), module=True)
    assert command(["python3.11", "-m", "package.train"]) == Command("package.train", (), module=True)


def test_torchrun_says_how_many_ranks(here):
    words = ["torchrun", "--nnodes=16", "--nproc_per_node=8", "--rdzv_backend=c10d", "train.py", "--lr", "1"]
    assert command(words) == Command("train.py", ("--lr", "1"), nodes=16, gpus_per_node=8)
    words = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "package.train"]
    assert command(words) == Command("package.train", (), module=True, nodes=1, gpus_per_node=2)
    assert command(["torchrun", "--nproc_per_node=gpu", "train.py"]).gpus_per_node is None


def test_accelerate_says_its_ranks_and_what_it_would_set(here):
    pytest.importorskip("accelerate")
    words = ["accelerate", "launch", "--num_processes", "8", "--num_machines", "2", "--mixed_precision", "bf16"]
    found = command([*words, "--multi_gpu", "--machine_rank", "0", "--main_process_ip", "h", "--main_process_port", "1",
                     "train.py", "--mixed_precision", "no"])  # fmt: skip
    assert (found.nodes, found.gpus_per_node) == (2, 4)
    assert found.arguments == ("--mixed_precision", "no")
    assert found.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script"),
        (["nowhere.py"], "nowhere.py does not exist"),
        (["-m"], "-m needs the name of a module"),
        (["torchrun", "--nproc_per_node=2"], "torchrun --nproc_per_node=2: "),
        (["torchrun", "--not-an-option", "train.py"], "train.py: unrecognized arguments: --not-an-option"),
        (["accelerate", "env"], "accelerate env starts no script"),
        (["."], "a folder without __main__.py"),
    ],
)
def test_what_starts_no_script_is_refused_with_what_to_give(here, words, said):
    with pytest.raises(SpecError) as error:
        command(words)
    assert said in str(error.value)
