"""The one renderer of tables: plain text for pages and pipes, colours on a terminal, and HTML.

rich lays the columns out, and is imported by the first table that is printed, not with llmlab.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rich.table
    from rich.text import Text

Row = Sequence[str]
UNLIMITED = 100_000  # characters; rich has no word for it
# How a cell that begins with these words looks on a terminal.
STYLES = {
    "fits": "green", "runs": "green", "out of memory": "red", "does not run": "red", "unknown": "yellow",
    "not measured yet": "dim", "peak allocated": "bold",
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of text under a `header`; one of empty names is not shown. `words` are the columns that are aligned left,
    and on a page all of them but the first wrap.

    With a `title` the rows stand between blank lines, and a rule is under the header. `links` are the addresses of
    cells, by their text.
    """

    header: Row
    rows: Sequence[Row]
    title: str = ""
    footer: str = ""
    words: Sequence[int] = (0,)
    links: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        from rich.console import Console

        out = StringIO()
        # As wide as the cells are, whatever terminal there is: a page, a test and a pipe get the same, and all of it.
        console = Console(file=out, width=UNLIMITED, force_terminal=False, force_jupyter=False)
        console.print(self._columns())
        lines = [line.rstrip() for line in out.getvalue().strip("\n").splitlines()]
        return "\n".join([*filter(None, [self.title]), *lines, *filter(None, [self.footer])])

    __repr__ = __str__

    def __rich_console__(self, *_: Any) -> Iterator[Text | rich.table.Table]:
        from rich.text import Text

        if self.title:
            yield Text(self.title, style="bold")
        yield self._columns()
        if self.footer:
            yield Text(self.footer, style="dim")

    def _columns(self) -> rich.table.Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE if self.title else None, show_header=any(self.header), pad_edge=False)
        for place, name in enumerate(self.header):
            # In a narrow terminal words go on in the next line; a number stays whole.
            if place in self.words:
                table.add_column(Text(name), justify="left", overflow="fold")
            else:
                widest = max(len(row[place]) for row in (self.header, *self.rows))
                table.add_column(Text(name), justify="right", min_width=widest)
        for row in self.rows:
            table.add_row(*(Text(cell, style=self._style(cell)) for cell in row))
        return table

    def _style(self, cell: str) -> str:
        if cell in self.links:
            return f"link {self.links[cell]}"
        return next((style for words, style in STYLES.items() if cell.startswith(words)), "")

    def _repr_html_(self) -> str:
        # No colours of its own: the table takes the page's, light or dark. Two spaces before a label indent it.
        head = ""
        if any(self.header):
            head = "<thead><tr>" + "".join(f"<th>{escape(name)}</th>" for name in self.header) + "</tr></thead>"
        body = ""
        for row in self.rows:
            cells = ""
            for place, cell in enumerate(row):
                indent = "padding-left:1.5em;" if cell.startswith("  ") else ""
                style = f"text-align:left;{indent}" if place in self.words else "text-align:right"
                kind = ' class="prose"' if place and place in self.words else ""
                text = escape(cell.strip())
                if cell in self.links:
                    text = f'<a href="{escape(self.links[cell])}">{text}</a>'
                cells += f'<td{kind} style="{style}">{text}</td>'
            body += f"<tr>{cells}</tr>"
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        notes = "<br>".join(escape(line) for line in self.footer.splitlines())
        return (
            f'<div style="overflow-x:auto"><table class="llmlab">{caption}{head}'
            f"<tbody>{body}</tbody></table></div><small>{notes}</small>"
        )


class Tabular(ABC):
    """What is shown as one table, wherever it is shown."""

    @abstractmethod
    def _table(self) -> Table: ...

    def __str__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def show(answer: Table | Tabular | str, in_words: Callable[[str], str] = str) -> None:
    """Print to stdout: to a terminal a table in its width and in colours (not with NO_COLOR set), else plain text.
    `in_words` returns the footer of a table as it is printed."""
    table = answer._table() if isinstance(answer, Tabular) else answer
    if isinstance(table, Table):
        table = replace(table, footer=in_words(table.footer))
    if isinstance(table, str) or not sys.stdout.isatty():
        print(table)
        return
    from rich.console import Console

    console = Console(highlight=False)
    any_width = console.options.update(width=UNLIMITED)
    least = console.measure(table._columns(), options=any_width).minimum
    console.width = max(console.width, least)  # in less rich cuts numbers off
    console.print(table)
