"""The fixture `simulated_gpu`: a test that fails where training does not fit, and says what has grown."""

import json
import os

import pytest

from llmlab.ranks.launch import new_process

pytest.importorskip("torch")
pytest_plugins = "pytester"

TEST = """
import torch

def test_fits(simulated_gpu):
    with simulated_gpu("A100-40GB", max_gib={limit}) as sim:
        layers = torch.nn.Linear(64, {hidden}, device="cuda"), torch.nn.Linear({hidden}, 64, device="cuda")
        model = torch.nn.Sequential(*layers)
        model(torch.randn(8, 64, device="cuda")).sum().backward()
    assert sim.peak_allocated > 0
"""


def inner(folder, options):
    """Run in a process of its own, which has imported torch."""
    os.chdir(folder)
    os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    pytest.main(["-p", "no:cacheprovider", *options])


def run(pytester, *options, **files):
    pytester.makepyfile(**{name: TEST.format(**sizes) for name, sizes in files.items()})
    process = new_process(inner, (pytester.path, options), "pytest")
    process.start()
    process.join()
    return pytest.LineMatcher((pytester.path / "said").read_text().splitlines())


def test_what_it_took_is_stored_and_what_grows_or_fills_the_card_fails(pytester):
    run(pytester, "--update-memory", test_memory={"limit": 2, "hidden": 1024}).fnmatch_lines(["* 1 passed*"])
    before = (pytester.path / "test_memory.memory.json").read_text()
    stored = json.loads(before)["test_fits"]
    assert stored["peak_allocated"] == sum(stored["modules"].values())
    grown, full = {"limit": 1, "hidden": 1 << 20}, {"limit": 30, "hidden": 1 << 28}
    said = run(pytester, test_memory=grown, test_full=full)
    said.fnmatch_lines(["test_fits takes *GiB of A100-40GB's 1.00 GiB", "what has grown since*", "*+*GiB  [*]"])
    said.fnmatch_lines(["test_fits runs out of memory on A100-40GB: *", "the peak by module*", "* 2 failed*"])
    said.no_fnmatch_line("*During handling*")
    assert (pytester.path / "test_memory.memory.json").read_text() == before


def test_torch_is_not_imported_before_a_test_asks(pytester):
    pytester.makepyfile("import sys\ndef test_light():\n    assert 'torch' not in sys.modules")
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
