"""One renderer of tables: text, colour on a terminal alone, HTML in the page's colours, Markdown."""

import re
import subprocess
import sys
from io import StringIO

import pytest

import llmlab as lab
from llmlab.base import tables
from llmlab.base.tables import Table

LIST = Table(("name", "GiB", "outcome"), [("a | b", "1.50", "fits"), ("<b>", "10.00", "out of memory")], words=(0, 2))


class Terminal(StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, table, **environment):
    """What `show` writes to a terminal of 60 columns."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "60", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    tables.show(table)
    return terminal.getvalue()


def test_text_is_columns_as_wide_as_their_cells():
    assert str(LIST) == "name     GiB  outcome\na | b   1.50  fits\n<b>    10.00  out of memory"
    long = Table(("", ""), [("x" * 300, "1")], "title", "footer")
    assert str(long).splitlines() == ["title", "", f" {'x' * 300}   1", "", "footer"]


def test_a_terminal_gets_colour_and_what_is_no_terminal_the_plain_text(monkeypatch):
    coloured = shown(monkeypatch, LIST)
    assert "\x1b[32mfits" in coloured and "\x1b[31mout of memory" in coloured
    monkeypatch.setattr("sys.stdout", pipe := StringIO())
    tables.show(LIST)
    assert pipe.getvalue() == f"{LIST}\n"


def test_a_cell_may_lead_somewhere(monkeypatch):
    linked = Table(("name", "page"), [("a", "one"), ("b", "none")], words=(0, 1), links={"one": "https://x.org/?a&b"})
    assert '<a href="https://x.org/?a&amp;b">one</a>' in linked._repr_html_() and ">none<" in linked._repr_html_()
    assert str(linked) == str(Table(linked.header, linked.rows, words=(0, 1)))
    assert "https://x.org/?a&b" in shown(monkeypatch, linked)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_who_wants_no_colour_gets_none(monkeypatch, environment):
    answer = shown(monkeypatch, LIST, **environment)
    assert "\x1b[3" not in answer and "out of memory" in answer


def test_in_a_narrow_terminal_words_wrap_and_numbers_stay_whole(monkeypatch):
    wide = Table(("what", "bytes"), [("word " * 40, "123,456,789")])
    lines = re.sub(r"\x1b\[\d*m", "", shown(monkeypatch, wide)).splitlines()
    assert max(map(len, lines)) <= 60 and lines[1].endswith("123,456,789") and " ".join(lines).count("word") == 40
    numbers = Table([f"n{i}" for i in range(9)], [["474.70 MiB"] * 9], words=())
    assert shown(monkeypatch, numbers).count("474.70 MiB") == 9


def test_html_takes_the_pages_colours_escapes_and_indents():
    html = Table(("", ""), [("weights", "1"), ("  <mlp>", "2")], "gpt2 & co")._repr_html_()
    assert "<caption>gpt2 &amp; co</caption>" in html and "color" not in html and "<thead>" not in html
    assert '<td style="text-align:left;padding-left:1.5em;">&lt;mlp&gt;</td><td style="text-align:right">2</td>' in html


def test_every_answer_is_a_table_by_the_same_renderer(monkeypatch):
    report = lab.estimate("gpt2", lab.Training(seq_len=16), "T4")
    for answer in (report, lab.Comparison((report,)), lab.doctor()):
        assert isinstance(answer, tables.Tabular) and str(answer) == str(answer._table())
    assert "\x1b[1mgpt2 on T4, estimated" in shown(monkeypatch, report)


def test_without_matplotlib_all_but_plots_works_and_a_plot_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"  # `import matplotlib` raises ModuleNotFoundError
        "import llmlab as lab; report = lab.estimate('gpt2', lab.Training(), 'T4')\n"
        "from click.testing import CliRunner; from llmlab.cli.main import cli\n"
        "for words in (['estimate', 'gpt2', '--gpu', 'T4'], ['gpus'], ['models'], ['records'], ['doctor']):\n"
        "    assert CliRunner().invoke(cli, words).exit_code == 0, words\n"
        "for draw in (report.plot, lambda: __import__('llmlab.plots.curve')):\n"
        "    try: draw()\n"
        "    except lab.NotAvailable as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = "plots need matplotlib, which is not installed: pip install 'llmlab[plot]'"
    assert done.stdout.splitlines() == [said, said]


def test_llmlab_is_imported_without_rich_matplotlib_and_what_answers():
    code = (
        "import sys, llmlab; late = [f'llmlab.{each}' for each in ('formulas', 'planning', 'notebook.calculator')];"
        "print({'pandas', 'pyarrow', *late} & {*sys.modules});"
        "import llmlab.cli.main; print({'rich', 'matplotlib', 'torch', 'numpy'} & {*sys.modules});"
        "print(llmlab.estimate('gpt2', llmlab.Training(), 'T4')); print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    light, first, *_, last = done.stdout.splitlines()
    assert (light, first, last) == ("set()", "set()", "True")
