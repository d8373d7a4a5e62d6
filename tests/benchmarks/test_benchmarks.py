"""The benchmarks: arithmetic of the errors, each peer asked once, and the results that the book shows. No timings."""
import json
import re
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from benchmarks import provenance
from benchmarks.agreement import cpu_grid
from benchmarks.memory import configurations, held_out, loading, peers
from benchmarks.memory.load_orders import Peaks
from benchmarks.memory.questions import TOOLS, Tool, installed
from benchmarks.speed import speed
from llmlab.base.units import MiB
from llmlab.specs.run import CHECKPOINTING

FOLDER = Path(__file__).parents[2] / "benchmarks"


RESULTS = FOLDER / "results" / "peers.json"
AGAIN = "make the results again: python -m benchmarks.memory.peers --out benchmarks/results"
CANNOT = {"MemTracker": "nf4"}  # the base that a tool says it cannot be asked for
QLORA = lab.Training(
    micro_batch=2, seq_len=512, precision="fp16", checkpointing="full", quantization="nf4",
    lora=lab.LoRA(rank=32, targets=("q_proj", "k_proj", "v_proj", "o_proj")),
)  # fmt: skip


@pytest.fixture(scope="module")
def results():
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def row(allocated: int, reserved: int, after_load: int = 100, seq_len: int = 512) -> dict:
    """A row of peers.json with its sizes in MiB; 440 MiB reserved were predicted."""
    predicted = {"llmlab simulate": allocated * MiB, "llmlab simulate, reserved": 440 * MiB, "MemTracker": None}
    return {
        "model": "a/m", "quantization": "nf4", "attention": "eager", "micro_batch": 2, "seq_len": seq_len,
        "peak_allocated": allocated * MiB, "peak_reserved": reserved * MiB, "after_load": after_load * MiB,
        "session": "s", "predicted": predicted,
    }  # fmt: skip


def report(peak: int) -> lab.Report:
    return lab.Report(
        source="published", model="SmolLM2-135M", run=QLORA, gpu="T4", peak_allocated=peak, citation="none"
    )


# ---- arithmetic


def test_an_error_is_signed_and_relative_to_what_was_measured():
    assert peers.relative_error(90, 100) == pytest.approx(-0.1)
    assert peers.relative_error(300, 100) == pytest.approx(2.0)


def test_summary_takes_the_median_of_sizes_and_keeps_the_worst_ones_sign():
    assert peers.summarise([0.01, -0.5, 0.2, -0.1]) == {
        "rows": 4, "median_abs_error": pytest.approx(0.15), "worst_error": -0.5, "too_low": 2,
    }  # fmt: skip


def test_no_row_covered_is_unknown_not_zero():
    assert peers.summarise([])["median_abs_error"] is None


def test_a_row_a_tool_cannot_be_asked_for_is_left_out_of_its_summary():
    rows = [{"predicted": {"x": 110}, "peak_allocated": 100}, {"predicted": {"x": None}, "peak_allocated": 100}]
    assert peers.errors_of("x", "peak_allocated", rows) == [pytest.approx(0.1)]


def test_results_are_not_renewed_without_a_peer(monkeypatch, tmp_path):
    absent = Tool("absent", "no-such-peer-of-llmlab", lambda spec, run: 1, "the run", "peak_allocated", "")
    monkeypatch.setattr(peers, "TOOLS", (TOOLS[0], absent))
    run = CliRunner().invoke(peers.main, ["--out", str(tmp_path)])
    assert run.exit_code == 1 and "no-such-peer-of-llmlab is not installed" in run.output
    assert not list(tmp_path.iterdir())


# ---- each tool on one row


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_each_tool_answers_in_bytes_or_is_not_installed(tool):
    answer = peers.predictions(tool, [report(10**9)])
    if installed(tool.package) is None:
        assert answer == "not installed"
    elif CANNOT.get(tool.name) == QLORA.quantization:
        assert answer == [None]
    else:
        assert 50 * 2**20 < answer[0] < 64 * 2**30  # 135M parameters in 4 bits, and less than any GPU


# ---- the committed results


def test_results_name_every_tool_and_hold_every_published_row(results):
    assert results["schema"] == peers.SCHEMA
    assert [tool["name"] for tool in results["tools"]] == [tool.name for tool in TOOLS]
    assert len(results["rows"]) == len(peers.published_rows())
    for tool in results["tools"]:
        asked = [row for row in results["rows"] if row["quantization"] != CANNOT.get(tool["name"])]
        assert tool["rows"] == len(asked) > 0, AGAIN


def test_results_were_made_with_the_versions_that_pyproject_asks_for(results):
    from packaging.requirements import Requirement

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for extra in ("torch", "benchmarks") for line in project["optional-dependencies"][extra]]
    asked = {r.name: r.specifier for r in map(Requirement, extras)}
    assert results["versions"]["llmlab"] == lab.__version__, AGAIN
    for package in {tool.package for tool in TOOLS} - {"llmlab"}:
        assert asked[package].contains(results["versions"][package]), AGAIN


def test_results_hold_what_the_estimate_says_today(results):
    today = peers.predictions(TOOLS[0], peers.published_rows())
    assert [row["predicted"]["llmlab"] for row in results["rows"]] == today, AGAIN


def loads(in_order, *drawn: tuple[int, int] | None, load: int = 50) -> loading.Loaded:
    """A step simulated in order and in draws: allocated and reserved in MiB, None for out of memory."""
    others = {"load": load * MiB, "backward": 90 * MiB, "optimizer": 50 * MiB}
    found = [each and Peaks(each[0] * MiB, each[1] * MiB, others | {"forward": each[0] * MiB})
             for each in (in_order, *drawn)]  # fmt: skip
    return loading.Loaded(found[0], found[1:])


def measured(peak: int, reserved: int, session: str, seq_len: int = 512, **others) -> lab.Report:
    return replace(
        report(peak * MiB), run=replace(QLORA, seq_len=seq_len, **others), peak_reserved=reserved * MiB,
        phases={"load": 51 * MiB, "forward": peak * MiB}, environment={"session": session},
    )  # fmt: skip


@pytest.fixture
def simulated_as_loaded(monkeypatch):
    """Two steps in NF4, whose order of loading tells, and one whose base is not quantized."""
    known = {
        512: loads((100, 200), (103, 210), (105, 230), None, (104, 220), load=50),
        1024: loads((300, 400), (306, 440), (305, 430), load=50),
        2048: loads((500, 600), load=51),
    }
    monkeypatch.setattr(loading, "loaded", lambda model, run: known[run.seq_len])


def test_a_session_is_told_to_load_by_threads_by_its_allocated_bytes_alone(simulated_as_loaded):
    in_order = [measured(100, 999, "first"), measured(300, 400, "first", 1024)]
    by_threads = [measured(100, 200, "second"), measured(305, 400, "second", 1024)]
    assert loading.by_threads(in_order) == set()
    assert loading.by_threads(in_order + by_threads) == {"second"}
    assert loading.sessions(in_order + by_threads) == [
        ["first", "2", "2", "0", "in order"], ["second", "2", "1", "1", "by threads"],
    ]  # fmt: skip


def test_a_row_loaded_by_threads_is_held_to_the_median_of_the_draws(simulated_as_loaded):
    rows = [measured(103, 220, "s"), measured(300, 400, "in order", 1024)]
    assert loading.error(rows[0], {"s"}) == 0 and loading.error(rows[0], set()) == pytest.approx(200 / 220 - 1)
    assert loading.error(rows[1], {"s"}) == 0
    assert loading.of(rows[0]).typical.phases["forward"] == 104 * MiB
    assert loading.Loaded(None, [None, None, loading.of(rows[0]).in_order]).typical is None


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=5), st.integers(1, 10**6))
def test_no_one_number_is_nearer_to_figures_that_differ_than_the_least_worst_error(measured, number):
    floor = peers.least_worst_error(measured)
    best = 2 * max(measured) * min(measured) / (max(measured) + min(measured))
    worst = lambda predicted: max(abs(predicted / true - 1) for true in measured)  # noqa: E731
    assert worst(number) >= floor - 1e-9 and worst(best) == pytest.approx(floor)


def test_bases_not_quantized_load_and_reserve_the_same_bytes_every_time(results):
    errors = {name: error for name, _, _, error in peers.loads(results["rows"])}
    assert {error for name, error in errors.items() if name.endswith(", none")} == {"0.00%"}
    assert {error for name, error in errors.items() if name.endswith(", nf4")} > {"0.00%"}


# ---- rows that were held out


def test_no_row_that_was_held_out_is_one_of_those_in_view():
    seen, unseen, refused = peers.published_rows(), peers.published_rows(unseen=True), held_out.refused_rows()
    assert seen and unseen and refused
    sessions = [{row.environment["session"] for row in rows} for rows in (seen, unseen)]
    assert not sessions[0] & sessions[1] and held_out.FITTED in sessions[1]


def test_the_rows_that_miss_the_reserved_bar_are_the_kind_that_the_book_says(results):
    rows = results["rows"]
    missed = [r for r in rows if abs(configurations.errors(r, configurations.RESERVED, "peak_reserved")) > 0.05]
    assert {(r["quantization"], r["seq_len"]) for r in missed} == {("nf4", min(r["seq_len"] for r in rows))}
    repeats = [g for g in configurations.configurations(rows) if any(r in missed for r in g) and len(g) > 1]
    assert [configurations.spread([r["peak_reserved"] for r in g]) > 0.05 for g in repeats] == [True]


# ---- speed


def test_import_and_a_lookup_leave_torch_out():
    assert not speed.torch_is_imported("import llmlab; llmlab.model('gpt2'), llmlab.gpu('T4')")
    assert speed.torch_is_imported("import torch")


def test_the_books_table_is_made_from_these_results(results):
    assert RESULTS.with_suffix(".md").read_text(encoding="utf-8") == peers.to_markdown(results) + "\n"


# ---- the files of speed and overhead


def test_a_markdown_table_escapes_the_bar_that_would_end_a_cell():
    lines = provenance.table(["name", "|error|"], [["a | b", "1.50"]])
    assert lines == [r"| name | \|error\| |", "| --- | ---: |", r"| a \| b | 1.50 |"]


def test_writing_is_whole_or_not_at_all_and_asked_for(tmp_path):
    folder = tmp_path / "results"
    provenance.write(folder / "speed.md", "text")
    assert [(file.name, file.read_text(encoding="utf-8")) for file in folder.iterdir()] == [("speed.md", "text\n")]


SHOWN_ELSEWHERE = ("peers", "kernel_times", "kernel_sweep")  # by a test above; by the chapter, from the record


@pytest.mark.parametrize("name", [p.stem for p in sorted(RESULTS.parent.glob("*.md")) if p.stem not in SHOWN_ELSEWHERE])
def test_the_book_shows_results_of_this_version(name):
    text = (RESULTS.parent / f"{name}.md").read_text(encoding="utf-8")
    assert f"llmlab {lab.__version__}" in text and re.search(r"\d cores.*\d{4}-\d\d-\d\d", text)
    folder = FOLDER.parent / "book"
    page = "".join(each.read_text(encoding="utf-8") for each in folder.glob("*.md"))
    assert f"```{{include}} ../benchmarks/results/{name}.md" in page
    makefile = (FOLDER.parent / "Makefile").read_text(encoding="utf-8")
    script = {"overhead": "measure_overhead"}.get(name, name)
    assert re.search(rf"-m benchmarks\.\w+\.{script} --out benchmarks/results\n", makefile)


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.md")), ids=lambda path: path.stem)
def test_every_row_of_a_table_has_the_cells_of_its_header(path):
    text = path.read_text(encoding="utf-8")
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines.splitlines()}) == 1, lines.splitlines()[0]


# ---- the CPU


def test_the_grid_has_every_combination_of_a_training_step_once():
    runs = [(name, run) for what, name, run in cpu_grid.grid() if what.startswith("training")]
    ways = (cpu_grid.SHAPES, cpu_grid.PRECISIONS, cpu_grid.STEPPED, CHECKPOINTING, cpu_grid.ATTENTIONS, (1, 2))
    assert len(runs) == len(set(runs)) == prod(map(len, ways))
