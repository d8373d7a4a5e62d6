"""Execute the book: book/NAME.md (MyST source, read by jupytext) -> book/NAME.ipynb (with its outputs).

    python tools/notebooks.py            # the pages whose text has changed, or the code and data that they use
    python tools/notebooks.py --force    # all pages
    python tools/notebooks.py 02-memory-anatomy
    python tools/notebooks.py --site FOLDER    # a reader's own copy: execute and render in FOLDER, leave book/ alone
    python tools/notebooks.py --force --record --out FOLDER    # on a GPU: write to FOLDER, and record in the ledger

A page whose cell raises does not stop the others; the command names it at the end and exits with 1. In book/ the old
notebook then stays; in another folder the page is written up to that cell, with a line that says so. There is no cache
of cells: jupyter-cache looks at the notebook alone, so after a change in llmlab a page would keep stale numbers. Here a
page is executed again if its text, anything in llmlab (code or data), or the pinned versions have changed. Differences
between runs that mean nothing (cell ids, times of execution, how a stream is divided) are removed, so equal results
give equal bytes. Do not edit a page while it runs: its stamp is computed afterwards, so it would count as up to date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jupytext
import nbformat
import stamp
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
STAMPS = ROOT / "_build" / "stamps"
CELL_TIMEOUT = 300  # seconds; a whole chapter should take 60 on a CPU, and a slower machine should still finish


# Run before and after a chapter with --record. A chapter that measures resets torch's peak: keep each earlier peak.
PROLOGUE = """
import torch
from llmlab.hardware import pretend
pretend.apply()  # LLMLAB_AS
_peaks, _reset = [0], torch.cuda.reset_peak_memory_stats
def _keep_and_reset(device=None):
    _peaks.append(torch.cuda.max_memory_allocated(device))
    _reset(device)
torch.cuda.reset_peak_memory_stats = torch.cuda.memory.reset_peak_memory_stats = _keep_and_reset
"""
EPILOGUE = """
import json
import llmlab
from llmlab.hardware.this_machine import environment, host
from llmlab.archive.lookup import gpu_of
_here = host()
print(json.dumps({
    "device": _here.device,
    "peak_allocated": max(*_peaks, torch.cuda.max_memory_allocated()) if _here.device == "cuda" else None,
    "dtype": llmlab.scale().precision,
    "gpu": gpu_of(_here),
    "environment": environment(),
}))
"""


STOPS = (CellExecutionError, CellTimeoutError, DeadKernelError)


class Stopped(Exception):
    """A page that stopped before its end: the reason in one line, and the notebook with the outputs until then."""

    def __init__(self, notebook: NotebookNode, error: Exception) -> None:
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        done = [number for number, cell in enumerate(code, 1) if cell.execution_count is not None]
        why = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else str(error)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", why).strip().splitlines() or [type(error).__name__]
        super().__init__(f"code cell {max(done, default=1)} of {len(code)}: {lines[0]}")
        self.notebook = notebook


def sources() -> list[Path]:
    """Return the pages that are notebooks: MyST files whose header names jupytext."""
    return [path for path in sorted(BOOK.glob("*.md")) if path.read_text(encoding="utf-8")[:400].find("jupytext:") > 0]


def read_source(path: Path) -> NotebookNode:
    """Return the notebook of a MyST file, without outputs, with cell ids that depend on its text alone."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = hashlib.sha256(f"{number}\0{cell.source}".encode()).hexdigest()[:8]
    notebook.metadata = NotebookNode(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(path: Path, before: str = "", after: str = "") -> NotebookNode:
    """Return the executed notebook of the MyST file `path`; raise Stopped if a cell fails.

    `before` and `after` are code for an additional first and last cell.
    """
    notebook = read_source(path)
    if before:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
    if after:
        notebook.cells.append(nbformat.v4.new_code_cell(after))
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
        shutdown_kernel="immediate",
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # else ipykernel warns about its transport in each notebook
    )
    try:
        client.execute()
    except STOPS as error:
        if before:
            del notebook.cells[0]
        raise Stopped(notebook, error) from error
    finally:
        _say_what_pictures_show(notebook)
        notebook.metadata.language_info = NotebookNode(
            {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}
        )
    return notebook


def _say_what_pictures_show(notebook: NotebookNode) -> None:
    """Copy the alternative text of each picture from the output, where the figure put it, to the cell, for the site."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if alt := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell.metadata["mystnb"] = {"image": {"alt": alt}}


def execute_and_record(path: Path) -> NotebookNode:
    """Return the executed notebook and write the chapter's line in the ledger; a page without a number has none.

    On a machine without a CUDA GPU nothing is recorded, and a line says so.
    """
    chapter = re.fullmatch(r"\d\d-(.+)", path.stem)
    start = time.perf_counter()
    notebook = execute(path, PROLOGUE, EPILOGUE) if chapter else execute(path)
    seconds = time.perf_counter() - start
    if not chapter:
        return notebook
    facts = json.loads(notebook.cells.pop().outputs[-1].text)
    del notebook.cells[0]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count -= 1
    if facts.pop("device") != "cuda":
        print("no CUDA GPU here, so nothing for the ledger; ", end="")
        return notebook
    from llmlab.archive import record_chapter

    print(f"recorded in {record_chapter(chapter[1], seconds=round(seconds, 1), **facts)}; ", end="")
    return notebook


def write(notebook: NotebookNode, path: Path) -> None:
    """Write the notebook atomically: nobody sees a half-written file."""
    nbformat.validate(notebook)
    unfinished = path.with_suffix(".ipynb.new")
    try:
        nbformat.write(notebook, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_stopped(stopped: Stopped, path: Path) -> None:
    """Write a page that stopped, with a warning at its top that says where."""
    why = str(stopped).replace("`", "'")
    text = f":::{{warning}}\nOn this machine this page stopped at `{why}`. What follows that cell did not run.\n:::"
    stopped.notebook.cells.insert(1, nbformat.v4.new_markdown_cell(text))
    write(stopped.notebook, path)


def render(site: Path) -> bool:
    """Render the site from `site`/book and the pages without code; return whether that succeeded."""
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(ROOT / name, site)
    without_code = shutil.ignore_patterns("*.ipynb", "*.new", ".ipynb_checkpoints")
    shutil.copytree(BOOK, site / "book", ignore=without_code, dirs_exist_ok=True)
    shutil.copytree(ROOT / "benchmarks" / "results", site / "benchmarks" / "results", dirs_exist_ok=True)
    # Without -W: a page that stopped lacks labels that its last cells define, and other pages refer to them.
    command = [str(Path(sys.executable).with_name("jupyter-book")), "build", str(site), "--keep-going", "--all", "-q"]
    built = subprocess.run(command, check=False).returncode == 0
    if built:
        print(f"The book, as it ran here: file://{site.resolve()}/_build/html/index.html")
    return built


def key(path: Path) -> str:
    """Return the hash of everything that the notebook's outputs depend on."""
    pins = ROOT / "constraints.txt"
    return stamp.content_hash([path, ROOT / "llmlab", pins, Path(__file__).resolve()], extra=platform.python_version())


def bring_up_to_date(page: Path, out: Path, marks: Path, force: bool, record: bool) -> None:
    """Execute `page` into `out` unless its stamp says that it is up to date; raise Stopped if a cell fails."""
    result = out / f"{page.stem}.ipynb"
    mark = marks / f"{page.stem}.notebook"
    # The stamp's hash includes the result: a notebook that was changed by hand is made again.
    if not force and result.exists() and stamp.is_current(mark, key(page) + stamp.content_hash([result])):
        print("up to date")
        return
    start = time.perf_counter()
    try:
        write((execute_and_record if record else execute)(page), result)
    except Stopped as stopped:
        if out != BOOK:  # in book/ the old notebook stays
            mark.unlink(missing_ok=True)
            write_stopped(stopped, result)
        raise
    stamp.write(mark, key(page) + stamp.content_hash([result]))
    print(f"{time.perf_counter() - start:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute the book's notebooks.")
    parser.add_argument("names", nargs="*", help="pages without suffix; all when none is given")
    parser.add_argument("--force", action="store_true", help="execute also what is up to date")
    parser.add_argument("--out", type=Path, default=BOOK, metavar="FOLDER", help="where they go; default book/")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="execute into FOLDER/book, then render FOLDER")
    parser.add_argument("--record", action="store_true", help="write each chapter's line of the ledger")
    options = parser.parse_args()
    out = options.site / "book" if options.site else options.out
    marks = STAMPS / (options.site or out).name
    pages = sources()
    if unknown := sorted(set(options.names) - {page.stem for page in pages}):
        parser.error(f"no notebook {', '.join(unknown)}; there are {', '.join(page.stem for page in pages)}")
    pages = [page for page in pages if not options.names or page.stem in options.names]
    out.mkdir(parents=True, exist_ok=True)
    failed = {}
    for number, page in enumerate(pages, 1):
        print(f"[{number:2}/{len(pages)}] {page.stem}: ", end="", flush=True)
        try:
            bring_up_to_date(page, out, marks, options.force, options.record)
        except Stopped as stopped:
            print(f"STOPPED at {stopped}", flush=True)
            failed[page.stem] = str(stopped)
    rendered = render(options.site) if options.site else True
    for name, why in failed.items():
        print(f"{name} stopped at {why}", file=sys.stderr)
    return 1 if failed or not rendered else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # tools/stage.py tells the user what to do
        sys.exit(130)
    except OSError as error:
        sys.exit(f"\n{error}")
