"""Each page's text and its executed notebook say the same, and were executed: nbval compares nothing otherwise."""

import re
import sys
from functools import cache
from pathlib import Path

import jupytext
import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
sys.path.insert(0, str(ROOT / "tools"))  # scripts, not a package

import notebooks  # noqa: E402

SOURCES = [path for path in sorted(BOOK.glob("*.md")) if "jupytext:" in path.read_text(encoding="utf-8")[:400]]
each_page = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def cells(notebook):
    kept = [(sorted(cell.metadata.get("tags", [])), cell.metadata.get("tolerance")) for cell in notebook.cells]
    return [(cell.cell_type, cell.source, *metadata) for cell, metadata in zip(notebook.cells, kept, strict=True)]


@cache
def text(source: Path):
    return jupytext.read(source)


@cache
def executed(source: Path):
    path = source.with_suffix(".ipynb")
    assert path.is_file(), f"{path.name} is not there: run `make outputs` and commit it"
    return nbformat.read(path, as_version=4)


def test_the_book_has_notebooks():
    assert SOURCES and {path.stem for path in BOOK.glob("*.ipynb")} == {path.stem for path in SOURCES}


@each_page
def test_the_notebook_is_made_from_its_text(source):
    assert cells(executed(source)) == cells(text(source)), "run `make outputs` and commit the .ipynb"


@each_page
def test_every_code_cell_was_executed_in_order_and_none_failed(source):
    notebook = executed(source)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert [o.evalue for o in outputs if o.output_type == "error"] == []
    assert [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"] == []


@each_page
def test_the_first_cell_sets_up_llmlab_as_every_page_does(source):
    first = next(cell for cell in text(source).cells if cell.cell_type == "code")
    usual = (BOOK / "_setup.ipy").read_text(encoding="utf-8").rstrip("\n")
    # What a chapter imports besides: test_project.py.
    assert re.sub(r"(\[plot,torch,quant)[a-z,]*\]", r"\1]", first.source) == usual


@each_page
def test_no_cell_hides_from_nbval(source):
    for cell in executed(source).cells:
        tags = set(cell.metadata.get("tags", []))
        assert not tags & {"nbval-skip", "skip-execution", "raises-exception", "nbval-raises-exception"}
        if "nbval-ignore-output" in tags:  # what may differ by machine still has to hold something
            assert re.search(r"^\s*assert ", cell.source, re.MULTILINE), f"assert what must hold of:\n{cell.source}"


@each_page
def test_a_tolerance_is_of_rounding_and_for_outputs_that_are_compared(source):
    for cell in executed(source).cells:
        if "tolerance" in cell.metadata:
            assert 0 < cell.metadata["tolerance"] <= 0.05 and cell.outputs
            assert "nbval-ignore-output" not in cell.metadata.get("tags", [])


@each_page
def test_no_library_logs_onto_a_page(source):
    for cell in executed(source).cells:
        said = "".join(output.get("text", "") for output in cell.get("outputs", []))
        # A line of a log begins with its time, so it also differs from run to run.
        logged = re.search(r"\[(WARNING|INFO)\]|^WARNING", said, re.MULTILINE)
        assert not logged, f"silence the logger of:\n{cell.source}"


CHECK = re.compile(r"\bcheck_(?:answer|function)\(")


@each_page
def test_exercises_ask_and_their_solutions_are_right(source):
    cells = [cell for cell in executed(source).cells if cell.cell_type == "code" and CHECK.search(cell.source)]
    for cell in cells:
        said = "".join(output.get("text", "") for output in cell.outputs)
        assert {output.output_type for output in cell.outputs} == {"stream"}, "end the call with ; to hide its result"
        if "# Solution" in cell.source:
            assert re.search(r"^assert check_", cell.source, re.MULTILINE)
            assert said.startswith("Right: ")
        else:
            assert said.startswith("Your turn: ")
    solutions = ["# Solution" in cell.source for cell in cells]
    assert solutions == [False, True] * (len(cells) // 2), "each exercise checks itself and is followed by its solution"


@each_page
def test_outputs_name_no_path_of_one_machine(source):
    written = source.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert re.findall(r"(?:/home/|/root/|/tmp/|/work/|/Users/|C:\\\\)[\w.-]+", written) == []


def test_the_site_is_rendered_from_the_notebooks():
    from sphinx.util.matching import Matcher

    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    assert config["execute"]["execute_notebooks"] == "off"  # and so never from a cache
    excluded = Matcher(config["exclude_patterns"])
    for source in SOURCES:
        assert excluded(f"book/{source.name}"), f"{source.name} hides {source.stem}.ipynb from the site"
        assert not excluded(f"book/{source.stem}.ipynb")


def test_every_page_is_in_the_table_of_contents():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    listed = [toc["root"]] + [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    assert sorted(listed) == sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in BOOK.rglob("*.md"))


def test_the_first_page_asks_a_question_for_every_chapter():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [Path(chapter["file"]).name for part in toc["parts"][1:-1] for chapter in part["chapters"]]
    rows = re.findall(r"^\| \[\]\(([\w-]+)\.ipynb\) \| .*\? \|$", (BOOK / "intro.md").read_text(encoding="utf-8"), re.M)
    assert rows == chapters


def test_a_page_that_moved_forwards_to_one_that_is_there():
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]["config"]
    moved = config["html_context"]["moved"]
    assert config["html_additional_pages"] == dict.fromkeys(moved, "moved.html")
    for old, new in moved.items():
        assert not (ROOT / f"{old}.md").exists()
        assert (ROOT / f"{new}.md").is_file()


def test_what_chapters_need_is_listed_in_the_order_of_the_book():
    from llmlab.hardware.tables import read_table

    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    listed = [Path(chapter["file"]).name for part in toc["parts"] for chapter in part["chapters"]]
    numbered = [name for name in listed if name[:2].isdecimal()]
    assert [name[:2] for name in numbered] == [f"{number:02}" for number in range(1, len(numbered) + 1)]
    assert [name[3:] for name in numbered] == [entry["name"] for entry in read_table("chapters.toml")["chapter"]]


# ---- how they are executed

HEADER = "---\njupytext:\n  text_representation:\n    extension: .md\n    format_name: myst\n---\n\n# Page\n\n"
CELL = "```{{code-cell}} ipython3\n{}\n```\n"


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Write a page with one cell of code, and return how `make outputs` ends on it and the notebook's bytes."""
    monkeypatch.setattr(notebooks, "BOOK", tmp_path)
    monkeypatch.setattr(notebooks, "STAMPS", tmp_path / "stamps")

    def run(code, *arguments):
        (tmp_path / "page.md").write_text(HEADER + CELL.format(code))
        monkeypatch.setattr(sys, "argv", ["notebooks.py", *arguments])
        code = notebooks.main()
        return code, (tmp_path / "page.ipynb").read_bytes()

    return run


def test_a_page_that_raises_fails_and_leaves_the_notebook_that_was_there(make, capsys):
    ended, before = make("print(6 * 7)")
    assert ended == 0
    assert b"42" in before
    for _ in range(2):  # a failure is never up to date
        ended, after = make("1 / 0")
        assert ended == 1
        assert after == before
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_executing_again_gives_the_same_bytes_and_only_when_something_changed(make, capsys):
    code = "import sys, time\nprint(1, flush=True); time.sleep(0.01); print(2)"
    _, first = make(code)
    assert "up to date" not in capsys.readouterr().out
    assert make(code) == (0, first)
    assert "up to date" in capsys.readouterr().out
    assert make(code, "--force") == (0, first)
    assert make("print(3)")[1] != first


def test_the_readers_own_book_goes_on_when_a_page_stops_and_says_where(tmp_path, monkeypatch, capsys):
    book, site = tmp_path / "book", tmp_path / "here"
    book.mkdir()
    (book / "a.md").write_text(HEADER + CELL.format("print(6 * 7)") + CELL.format("1 / 0") + CELL.format("print(8)"))
    (book / "b.md").write_text(HEADER + CELL.format("print(9)"))
    monkeypatch.setattr(notebooks, "BOOK", book)
    monkeypatch.setattr(notebooks, "STAMPS", tmp_path / "stamps")
    rendered = []
    monkeypatch.setattr(notebooks, "render", lambda folder: rendered.append(folder) or True)
    monkeypatch.setattr(sys, "argv", ["notebooks.py", "--site", str(site)])
    assert notebooks.main() == 1
    assert rendered == [site]
    assert capsys.readouterr().err == "a stopped at code cell 2 of 3: ZeroDivisionError: division by zero\n"
    assert sorted(path.name for path in book.iterdir()) == ["a.md", "b.md"]  # the book itself is as it was
    code = [cell for cell in nbformat.read(site / "book" / "a.ipynb", 4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, None]
    assert "stopped at `code cell 2 of 3" in (site / "book" / "a.ipynb").read_text()
    assert "9" in (site / "book" / "b.ipynb").read_text()
    (book / "a.md").write_text(HEADER + CELL.format("print(6 * 7)"))
    assert notebooks.main() == 0
    assert "b: up to date" in capsys.readouterr().out
