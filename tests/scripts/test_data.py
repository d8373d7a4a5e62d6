"""Data sets and metrics that scripts load by name."""

import json
import sys

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from llmlab.base.errors import SpecError
from llmlab.cli import main as cli
from llmlab.scripts.data import read_data


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working directory with ten rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": str(i)}) for i in range(10)))
    return tmp_path


def run(home, body, *options):
    (home / "train.py").write_text(body)
    return CliRunner().invoke(cli.cli, ["run", "--gpu", "T4", *options, "train.py"])


def test_rows_stand_in_for_a_data_set_in_every_split(home):
    pytest.importorskip("datasets")
    body = """
from datasets import load_dataset
print(sorted(load_dataset("nobody/rows", "a-config")), end=" ")
print(len(load_dataset("nobody/rows", split="train[:50%]")), end=" ")
print(len(load_dataset("nobody/rows", split="test_prefs")), end=" ")
print(next(iter(load_dataset("nobody/rows", split="train", streaming=True))))
"""
    result = run(home, body, "--data", "nobody/rows=rows.jsonl")
    assert result.exit_code == 0, result.stderr
    assert "['test', 'train', 'validation'] 5 10 {'text': '0'}" in result.stdout


def test_a_data_set_that_is_nowhere_is_refused_with_the_option(home):
    pytest.importorskip("datasets")
    result = run(home, "from datasets import load_dataset\nload_dataset('nobody/rows')")
    assert result.exit_code == 2 and "--data NAME=rows.jsonl" in result.stderr and "train.py, line 2)" in result.stderr


@pytest.mark.parametrize("name", ["datasets", "evaluate", "kernels"])
def test_a_script_may_have_a_file_with_the_name_of_a_library(home, monkeypatch, name):
    monkeypatch.delitem(sys.modules, name, raising=False)
    (home / f"{name}.py").write_text("OWN = 'its own'")
    result = run(home, f"import {name}\nprint({name}.OWN)")
    sys.modules.pop(name, None)
    assert result.exit_code == 0, result.stderr
    assert "its own" in result.stdout


def test_a_metric_that_is_not_here_has_scores(home):
    pytest.importorskip("evaluate")
    body = """
import evaluate
metric = evaluate.load("accuracy-of-nobody")
metric.add_batch(predictions=[1], references=[0])
print(metric.compute()["accuracy"])
"""
    result = run(home, body)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("1.0\n") and "accuracy-of-nobody" in result.stderr


def test_torchvision_takes_files_that_stand_in_for_its_own(home, monkeypatch):
    """Held to a package of its name: what it does with a file is these two functions of it."""
    utils = home / "torchvision" / "datasets" / "utils.py"
    utils.parent.mkdir(parents=True)
    for each in (utils, utils.parent / "__init__.py", utils.parents[1] / "__init__.py"):
        each.write_text("")
    utils.write_text("""
import os
def check_md5(fpath, md5): return False
def check_integrity(fpath, md5=None): return os.path.isfile(fpath) and (md5 is None or check_md5(fpath, md5))
""")
    monkeypatch.syspath_prepend(str(home))
    (home / "pictures").write_text("of the user's own")
    result = run(home, """
from torchvision.datasets.utils import check_integrity
print(check_integrity("pictures", "0"), check_integrity("nowhere", "0"))
""")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("True False\n") and "not those of the published files" in result.stderr


@pytest.mark.parametrize("given", ["rows.jsonl", "=rows.jsonl", "name=", "name=nowhere.jsonl", "name=rows.xyz"])
def test_bad_data_are_refused(home, given):
    (home / "rows.xyz").write_text("")
    with pytest.raises(SpecError):
        read_data((given,))
