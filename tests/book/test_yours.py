"""book/yours: its stubs are those of the pages, and with the solutions of the pages all of its stages pass."""

import ast
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).resolve().parents[2]
YOURS = ROOT / "book" / "yours"
FILES = sorted(YOURS.glob("*.py"))
README = (YOURS / "README.md").read_text(encoding="utf-8")
PAGES = [path for path in sorted((ROOT / "book").glob("*.md")) if "`yours/" in path.read_text(encoding="utf-8")]


def definitions(code):
    """Return the source of each function and class of `code`, by its name."""
    nodes = [node for node in ast.parse(code).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {node.name: ast.get_source_segment(code, node) for node in nodes}


def exercises():
    """Yield the file, the stub and the solution of each exercise whose text says in which file to keep it."""
    for page in PAGES:
        file = stub = None
        for cell in jupytext.read(page).cells:
            source = cell.source.strip()
            if cell.cell_type == "markdown":
                files = re.findall(r"`yours/(\w+\.py)`", source.rpartition("Build")[2])
                file = files[0] if files and "Build" in source else None
            elif file and source.startswith("# Solution"):
                yield file, stub, re.sub(r"^assert .*", "", source, flags=re.MULTILINE)
            elif file and "NotImplementedError" in source:
                stub = source


EXERCISES = list(exercises())
LLAMA, TRAINER = re.findall(r"<summary>A solution</summary>\n+```python\n(.*?)```", README, re.DOTALL)
OURS = {"Llama": "gpt.py", **dict.fromkeys(definitions(TRAINER), "trainer.py")}  # no page asks for them
ASKED = OURS | {list(definitions(stub))[-1]: file for file, stub, _ in EXERCISES}


def solve(folder):
    """Put the solutions of the pages and of the README in the places of the stubs."""
    solutions = [(file, solution) for file, _, solution in EXERCISES]
    for file, solution in [*solutions, ("gpt.py", LLAMA), ("trainer.py", TRAINER)]:
        path = folder / file
        code = path.read_text(encoding="utf-8")
        for name in definitions(solution).keys() & definitions(code).keys():
            code = code.replace(definitions(code)[name], "")
        path.write_text(f"{code}\n\n{solution}", encoding="utf-8")


def run(folder, *arguments):
    """Return the exit code of the stage tests in `folder`, and what they print."""
    command = [sys.executable, "-m", "pytest", str(folder), "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(YOURS, tmp_path / "yours", ignore=shutil.ignore_patterns("__pycache__")))


def test_each_exercise_has_its_stub_in_the_file_that_the_page_names():
    assert {file for file, _, _ in EXERCISES} == {path.name for path in FILES} - {"__init__.py"}
    for file, stub, _ in EXERCISES:
        assert stub in (YOURS / file).read_text(encoding="utf-8"), file


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_all_else_in_a_file_is_printed_on_a_page(path):
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    code = path.read_text(encoding="utf-8")
    for node in ast.parse(code).body[1:]:
        if not isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "name", "") not in {"train", *OURS}:
            assert ast.get_source_segment(code, node) in pages


def test_the_readme_names_every_function_and_links_its_file():
    assert {name for name in ASKED if f"`{name}`" not in README} == set()
    assert set(ASKED.values()) <= set(re.findall(r"\]\((\w+\.py)\)", README))


def test_the_readme_installs_what_the_notebooks_install():
    """The checks of the exercises need no more than the pages, but matplotlib too."""
    setup = (ROOT / "book" / "_setup.ipy").read_text(encoding="utf-8")
    assert re.findall(r"llmlab\[.*?\]", README) == re.findall(r"llmlab\[.*?\]", setup)


def test_a_new_folder_passes_and_lists_what_is_not_written_yet(copy):
    code, said = run(copy)
    assert code == 0 and " failed" not in said, said
    listed = dict(re.findall(r"^not written yet: stage \d+ asks for (\w+) in ([\w.]+), line \d+$", said, re.MULTILINE))
    listed["fused_loss"] = listed.pop("FusedLoss")
    assert listed == {name: file for name, file in ASKED.items() if name != "add_and_norm" or find_spec("triton")}


def test_with_the_solutions_every_stage_passes_and_a_broken_trainer_fails_at_its_stage(copy):
    solve(copy)
    code, said = run(copy)
    assert code == 0 and "not written yet" not in said and " passed" in said, said
    trainer = copy / "trainer.py"
    text = trainer.read_text(encoding="utf-8")  # counts the tokens of the first micro-batch only:
    trainer.write_text(text.replace("for _, labels in batches)", "for _, labels in batches[:1])"), encoding="utf-8")
    code, said = run(copy, "--stage", "6", "-k", "gradient")
    failed = set(re.findall(r"^FAILED \S+test_stage_(\d\d)\.py", said, re.MULTILINE))
    assert code == 1 and failed == {"06"}, said
