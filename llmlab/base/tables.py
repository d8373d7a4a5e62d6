"""Tables of reports, as text and as HTML: a title, rows of a label and values, and a footer."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from io import StringIO

Row = tuple[str, ...]


def text_table(title: str, header: Row, rows: Sequence[Row], footer: str, width: int = 100) -> str:
    """Return a table whose lines have at most `width` characters; a `header` of empty names is left out."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=any(header), pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    out = StringIO()
    # A fixed width, so that what a page and a test see does not depend on somebody's terminal.
    console = Console(file=out, width=width, force_terminal=False, force_jupyter=False)
    console.print(table)
    lines = [title, *(line.rstrip() for line in out.getvalue().strip("\n").splitlines())]
    return "\n".join([*lines, footer] if footer else lines)


def html_table(title: str, header: Row, rows: Sequence[Row], footer: str) -> str:
    """Return the same in HTML; a label that begins with two spaces is indented."""
    # No colours of its own: the table takes the page's, light or dark.
    head = ""
    if any(header):
        head = "<thead><tr>" + "".join(f"<th>{escape(name)}</th>" for name in header) + "</tr></thead>"
    body = ""
    for label, *values in rows:
        indent = "padding-left:1.5em;" if label.startswith("  ") else ""
        cells = "".join(f'<td style="text-align:right">{escape(value)}</td>' for value in values)
        body += f'<tr><td style="text-align:left;{indent}">{escape(label.strip())}</td>{cells}</tr>'
    notes = "<br>".join(escape(line) for line in footer.splitlines())
    return (
        f'<div style="overflow-x:auto"><table class="llmlab"><caption>{escape(title)}</caption>{head}'
        f"<tbody>{body}</tbody></table></div><small>{notes}</small>"
    )
