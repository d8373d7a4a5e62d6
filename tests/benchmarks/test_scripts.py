"""The benchmark over other people's scripts: what it makes of what `llmlab run` says, and its tables."""
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.scripts import scripts

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "benchmarks"


from llmlab.base.errors import SCRIPT_FAILED  # noqa: E402

MODEL = """
import torch
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.randn(8, 256, device="cuda")).sum().backward(); optimizer.step()
"""
WRITTEN = {
    "trains.py": MODEL + "while True: step()",
    "fails.py": "import package_that_is_gone",
    "waits.py": "import threading\nthreading.Event().wait()",
}
ANSWER = {
    "command": "x", "steps": 2, "world_size": 8, "outcome": "fits", "ended": "was ended after 2 optimizer steps",
    "where": None, "peak_allocated": 3 << 30, "peak_reserved": 4 << 30, "notes": [],
}  # fmt: skip
CASE = scripts.Case("name", "repository", "train.py", own="No module named 'gone'")


def classified(code, output="", said="", stopped=""):
    return scripts.classified(CASE, code, stopped, output, said)


def said_by_the_script(error):
    return f"Traceback (most recent call last):\n{error}\nllmlab: {SCRIPT_FAILED}\n"


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "ran"),
        ({"ended": "ran to its end"}, "ran to its end"),
        ({"outcome": "out of memory", "where": "mm: 3 GiB"}, "out of memory"),
        ({"outcome": "unknown", "ended": "was interrupted"}, "too long"),
    ],
)
def test_an_answer(changes, outcome):
    text = "printed by a process\n" + json.dumps({**ANSWER, **changes}, indent=1)
    found = classified(0, text)
    assert (found["outcome"], found["ranks"], found["peak_reserved"]) == (outcome, 8, 4 << 30)


@pytest.mark.parametrize(
    ("code", "said", "stopped", "outcome"),
    [
        (2, "llmlab: rows.txt is not here (train.py, line 3)\n", "", "not supported"),
        (2, said_by_the_script("ImportError: No module named 'gone'"), "", "script error"),
        (2, said_by_the_script("AttributeError: _scatter"), "", "raw traceback"),  # nobody has said that it is its own
        (1, "Traceback (most recent call last):\nTypeError: x\n", "", "raw traceback"),
        (-9, "", "hang", "hang"),
        (-9, "", "", "host out of memory"),
        (2, "", "too long", "too long"),
    ],
)
def test_no_answer(code, said, stopped, outcome):
    assert classified(code, "", said, stopped)["outcome"] == outcome


@pytest.fixture
def folders(tmp_path):
    """A folder of clones with one repository, and one to work in."""
    clones, work = tmp_path / "clones", tmp_path / "work"
    (work / "logs").mkdir(parents=True)
    (clones / "mine").mkdir(parents=True)
    for name, body in WRITTEN.items():
        (clones / "mine" / name).write_text(body)
    return clones, work


def test_scripts_are_run_as_they_stand(folders, monkeypatch):
    monkeypatch.setattr(scripts, "IDLE", 2)

    def run(name, **how):
        return scripts.run_case(scripts.Case(name, "mine", name, gpu="T4", **how), *folders)

    with ThreadPoolExecutor() as beside:  # what only waits is no reason to wait
        waits = beside.submit(run, "waits.py", limit=8)
        done = run("fails.py", own="package_that_is_gone")
        assert done.outcome == "script error" and "package_that_is_gone" in done.said
        assert waits.result().outcome in ("hang", "too long")  # on a busy machine it may still be importing
    assert scripts.run_case(scripts.Case("x", "nowhere", "train.py"), *folders).outcome == "not there"
    assert sorted(path.name for path in (folders[0] / "mine").iterdir()) == sorted(WRITTEN)


def test_what_is_not_run_again_stays_as_it_is(folders, tmp_path):
    clones, work = folders
    table, old = tmp_path / "cases.toml", {"repository": "mine", "command": "x", "gpu": "T4", "outcome": "ran"}
    table.write_text('[old]\nin = "mine"\nrun = "x"\n[new]\nin = "mine"\nrun = "trains.py"\ngpu = "T4"\n')
    kept = {**old, "name": "old", "seconds": 1.0, "made": "before."}
    (tmp_path / "scripts.json").write_text(json.dumps({"scripts": [kept]}))
    words = ["--clones", str(clones), "--work", str(work), "--cases", str(table), "--out", str(tmp_path), "new"]
    assert not CliRunner().invoke(scripts.main, words, catch_exceptions=False).exit_code
    before, after = json.loads((tmp_path / "scripts.json").read_text())["scripts"]
    assert kept.items() <= before.items()
    assert (after["name"], after["outcome"]) == ("new", "ran") and after["made"] not in ("", "before.")
    assert after["steps"] == 2 and after["peak_reserved"] >= after["peak_allocated"] > 0


def test_the_table_of_scripts_can_be_read():
    cases = scripts.read_cases(FOLDER / "scripts" / "scripts.toml")
    for case in cases.values():
        assert (case.published is None) == (not case.source) and case.place and case.run


def test_versions_of_a_repository_count_once():
    names = ("torchtitan-v0.2.2", "torchtitan-2024-12", "llama2.c", "open-r1")
    results = [scripts.Result("x", name, "train.py", "T4", "not supported", 1.0) for name in names]
    assert "4 command lines from 3 repositories" in scripts.report(results)
