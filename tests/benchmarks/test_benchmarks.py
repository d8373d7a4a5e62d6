"""The benchmarks: arithmetic of the errors, each peer asked once, and the results that the book shows. No timings."""
import json
import platform
import re
import sys
from dataclasses import replace
from datetime import date
from math import prod
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from benchmarks import provenance
from benchmarks.agreement import cpu_grid
from benchmarks.memory import configurations, held_out, loading, peers, versions
from benchmarks.memory.load_orders import Peaks
from benchmarks.memory.questions import TOOLS, Tool, installed
from benchmarks.memory.questions.mem_tracker import mem_tracker_peak
from benchmarks.speed import measure_overhead, speed
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


def test_a_peer_that_is_not_installed_is_a_column_that_says_so(monkeypatch):
    absent = Tool("absent", "no-such-peer-of-llmlab", lambda spec, run: 1, "the run", "peak_allocated", "")
    monkeypatch.setattr(peers, "TOOLS", (TOOLS[0], absent))
    results = peers.run_all([report(10**9)])
    assert [tool["missing"] for tool in results["tools"]] == [None, "not installed"]
    text = peers.to_markdown(results)
    assert "not installed" in text and configurations.TITLE not in text  # nothing was simulated


def test_results_are_not_renewed_without_a_peer(monkeypatch, tmp_path):
    absent = Tool("absent", "no-such-peer-of-llmlab", lambda spec, run: 1, "the run", "peak_allocated", "")
    monkeypatch.setattr(peers, "TOOLS", (TOOLS[0], absent))
    run = CliRunner().invoke(peers.main, ["--out", str(tmp_path)])
    assert run.exit_code == 1 and "no-such-peer-of-llmlab is not installed" in run.output
    assert not list(tmp_path.iterdir())


def test_a_peer_that_lacks_what_it_imports_is_a_column_that_says_so():
    def broken(spec, run):
        import no_such_module_of_a_peer  # noqa: F401

    tool = Tool("broken", "llmlab", broken, "the run", "peak_allocated", "")
    assert "no_such_module_of_a_peer" in peers.predictions(tool, [report(10**9)])


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


def test_mem_tracker_holds_the_tensors_of_a_step_with_frozen_parameters():
    spec = lab.model({**lab.model("SmolLM2-135M").config, "num_hidden_layers": 2})
    run = replace(QLORA, micro_batch=1, seq_len=64, quantization=None)
    assert mem_tracker_peak(spec, run) == pytest.approx(lab.simulate(spec, run, "cpu").peak_allocated, rel=0.02)


def test_fitchecks_total_is_its_tensors_and_an_overhead():
    if installed("fitcheck-llm"):
        by_name = {tool.name: peers.predictions(tool, [report(10**9)])[0] for tool in TOOLS if "fitcheck" in tool.name}
        assert by_name["fitcheck total"] > by_name["fitcheck tensors"]


def test_deepspeed_counts_20_bytes_a_parameter_with_zero_2_on_one_gpu():
    spec = lab.model("SmolLM2-135M")
    zero2 = next(tool for tool in TOOLS if tool.name == "DeepSpeed ZeRO-2")
    expected = "not installed" if installed("deepspeed") is None else [20 * spec.parameters]
    assert peers.predictions(zero2, [report(10**9)]) == expected


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


def test_a_tool_that_cannot_be_asked_for_a_row_shows_how_many_it_answers(results):
    answered = sum(row["quantization"] == "none" for row in results["rows"])
    line = next(line for line in peers.to_markdown(results).splitlines() if line.startswith("| MemTracker"))
    assert f"| {answered} of {len(results['rows'])} |" in line and "–" not in line
    assert re.search(r"^\| nf4 \|.* – \|", peers.to_markdown(results), re.MULTILINE)


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


def test_what_was_loaded_by_threads_says_how_far_it_is_off(simulated_as_loaded):
    rows = [measured(103, 200, "s"), measured(305, 450, "s", 1024), measured(500, 600, "s", 2048, quantization=None)]
    reserved, allocated, phases, between = loading.notes(rows)
    assert "median 3.33%, worst +10.00%; 2 of 3 rows within 5%, 1 exact" in reserved
    assert reserved.endswith("Not SmolLM2-135M, nf4, sdpa, 2 × 512 (+10.0%).") and "worst +0.97%" in allocated
    assert phases == "Phases: 4 of 6 within 1%; the farthest is load of SmolLM2-135M, nf4, sdpa, 2 × 512, -1.96%."
    assert "0 of 2 measured figures lie between" in between
    (held,) = loading.held(rows)
    assert held == ["SmolLM2-135M", "51", "50", "50"] and loading.notes([]) == []


def test_versions_show_each_figure_with_its_session_and_its_error(simulated_as_loaded):
    rows = [measured(103, 200, "s"), measured(100, 200, "t"), measured(103, 200, "s")]
    line = versions.Line(rows, 190 * MiB, loading.of(rows[0]))
    (cells,) = versions.body([line], {"s"})
    assert cells == ["SmolLM2-135M, nf4, sdpa, 2 × 512", "200 / 200", "190", "200",
                     "210 – 220 – 230 (out of memory in 1)", "+10.0% / +0.0%"]  # fmt: skip
    assert versions.to_markdown(rows, [line], "made here").endswith("made here")


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


def reported(reserved: int, peak: int = 100, outcome: str = "fits", **others) -> lab.Report:
    """A step of QLORA with its sizes in MiB, which peaks in the forward."""
    sizes = {"peak_allocated": peak * MiB, "peak_reserved": reserved * MiB} if outcome == "fits" else {}
    phases = {"load": 40 * MiB, "forward": peak * MiB, "backward": 90 * MiB, "optimizer": 50 * MiB}
    known = {"phases": phases, "environment": {"session": "s"}, **others}
    return lab.Report(source="published", model="a/m", run=QLORA, gpu="T4", outcome=outcome, **sizes, **known)


def test_no_row_that_was_held_out_is_one_of_those_in_view():
    seen, unseen, refused = peers.published_rows(), peers.published_rows(unseen=True), held_out.refused_rows()
    assert seen and unseen and refused
    sessions = [{row.environment["session"] for row in rows} for rows in (seen, unseen)]
    assert not sessions[0] & sessions[1] and held_out.FITTED in sessions[1]


def test_phases_and_time_are_held_to_each_row_of_a_configuration():
    once = loads((100, 200))
    line = held_out.Line([reported(200, 110, step_seconds=2.0), reported(200)], reported(200, step_seconds=1.0), once)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "loaded", lambda model, run: once)
        patch.setattr(lab, "estimate", lambda *asked: reported(200, 105))
        found = {what: cells for what, *cells in held_out.by_phase([line])}
        notes = held_out.notes([line], [], [row(200, 440), row(200, 440)])
    assert found["the peak in forward"] == ["4.77%", "+5.00%", "4.55%", "-9.09%"]
    assert found["seconds per step"] == ["–", "–", "50.00%", "-50.00%"]
    assert "within 1% in 1 of 2 rows" in notes[0]


def test_a_step_that_ran_out_of_memory_shows_what_was_asked_for_beside_what_is_simulated():
    outcome = "out of memory"
    said = ("PyTorch said: tried to allocate 1.20 GiB, of which 1.00 GiB is free; 11.80 GiB allocated, 1 GiB reserved",)
    ran_out = reported(0, outcome=outcome, where="backward, asked for 1.20 GiB", notes=said)
    said = ("no room for a segment of 1.16 GiB: 13.40 GiB of 14.42 GiB are reserved, 11.90 GiB allocated",)
    simulated = reported(0, outcome=outcome, where="backward, aten.mm in lm_head: 3 MiB short", notes=said)
    line = held_out.Line([ran_out], simulated, loads((100, 200), None, (100, 200)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "estimate", lambda *asked: reported(200))
        ((name, *cells),) = held_out.verdicts([line])
        said = held_out.notes([], [line], [])[-1]
    assert name == "m, nf4, sdpa, 2 × 512"
    assert cells == ["backward, 1.20 GiB on top of 11.80 GiB", "backward, 1.16 GiB on top of 11.90 GiB", "fits"]
    assert held_out.by_threads(line) == "out of memory in 1 of 2 draws"
    assert "lab.simulate recognizes 1 of the 1 steps that ran out of memory" in said
    assert "It recognizes 0 of the steps that ran out" in said


def test_the_rows_that_miss_the_reserved_bar_are_the_kind_that_the_book_says(results):
    rows = results["rows"]
    missed = [r for r in rows if abs(configurations.errors(r, configurations.RESERVED, "peak_reserved")) > 0.05]
    assert {(r["quantization"], r["seq_len"]) for r in missed} == {("nf4", min(r["seq_len"] for r in rows))}
    repeats = [g for g in configurations.configurations(rows) if any(r in missed for r in g) and len(g) > 1]
    assert [configurations.spread([r["peak_reserved"] for r in g]) > 0.05 for g in repeats] == [True]


# ---- speed


def test_speed_mixes_models_runs_and_cards():
    cases = speed.cases(10_000)
    assert len(cases) == 10_000
    assert {spec.name for spec, _, _ in cases} == {name for name in speed.models() if speed.model(name).has_formulas}
    assert {run for _, run, _ in cases} == set(speed.RUNS)


def test_import_and_a_lookup_leave_torch_out():
    assert not speed.torch_is_imported("import llmlab; llmlab.model('gpt2'), llmlab.gpu('T4')")
    assert speed.torch_is_imported("import torch")


def test_the_books_table_is_made_from_these_results(results):
    assert RESULTS.with_suffix(".md").read_text(encoding="utf-8") == peers.to_markdown(results) + "\n"


# ---- the files of speed and overhead


def test_a_markdown_table_escapes_the_bar_that_would_end_a_cell():
    lines = provenance.table(["name", "|error|"], [["a | b", "1.50"]])
    assert lines == [r"| name | \|error\| |", "| --- | ---: |", r"| a \| b | 1.50 |"]


def test_a_results_file_says_what_made_it_where_and_when():
    said = provenance.provenance("llmlab", "no-such-package-of-llmlab")
    assert f"llmlab {lab.__version__}" in said and "no-such-package-of-llmlab" not in said
    assert f"Python {platform.python_version()}" in said and date.today().isoformat() in said
    assert f"{lab.host().cores} cores" in said


ROWS = [
    speed.Row("import", "10 ms", "< 150 ms", True), speed.Row("one", "3 µs"), speed.Row("many", "9 s", "< 2 s", False),
]  # fmt: skip


def test_speed_shows_each_bar_and_whether_it_was_met():
    lines = speed.to_markdown(ROWS, "made here").splitlines()
    assert lines[2:4] == ["| import | 10 ms | < 150 ms | met |", "| one | 3 µs |  |  |"]
    assert lines[4] == "| many | 9 s | < 2 s | MISSED |"
    assert lines[-1] == "made here"


def test_overhead_shows_the_noise_beside_what_was_metered():
    pairs = [(1.0, 1.0, 1.0), (1.0, 1.01, 1.2), (1.0, 1.02, 1.2), (1.0, 1.03, 1.2)]
    row = measure_overhead.summary("plain, metered", pairs)
    text = measure_overhead.to_markdown("gpt2, seq_len 8", [row], ["x"], "me")
    assert "| plain, metered | 1000.0 ms | 1015.0 ms | 1.0150 | 1.0025 to 1.0275 |" in text
    assert text.startswith("**gpt2, seq_len 8**") and text.endswith("- x\n\nme")


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


def test_steps_on_the_cpu_are_counted_by_line_and_those_outside_are_named():
    run = lab.Inference(batch=1, prompt_len=8, new_tokens=4)
    found = [
        cpu_grid.Compared("a line", "gpt2", run, error=0.0),
        cpu_grid.Compared("a line", "llama", run, error=-0.0004),
        cpu_grid.Compared("another", "llama", run, error=-0.02),
    ]
    assert cpu_grid.body(found) == [
        ["a line", "2", "2", "0.0200%", "-0.0400%"],
        ["another", "1", "0", "2.0000%", "-2.0000%"],
    ]
    text = cpu_grid.to_markdown(found, "made")
    assert "of 3 steps of two models of three blocks: 2 within 0.1%" in text
    assert f"- Outside: llama, `{run!r}`: -2.00%." in text


def test_the_grid_has_every_combination_of_a_training_step_once():
    runs = [(name, run) for what, name, run in cpu_grid.grid() if what.startswith("training")]
    ways = (cpu_grid.SHAPES, cpu_grid.PRECISIONS, cpu_grid.STEPPED, CHECKPOINTING, cpu_grid.ATTENTIONS, (1, 2))
    assert len(runs) == len(set(runs)) == prod(map(len, ways))
