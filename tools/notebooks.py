"""Execute the book: book/NAME.md (MyST source, read by jupytext) -> book/NAME.ipynb (with its outputs).

    python tools/notebooks.py            # those whose text, or the code and data they call, has changed
    python tools/notebooks.py --force    # all
    python tools/notebooks.py 01-memory-anatomy
    python tools/notebooks.py --force --record --out FOLDER    # on a GPU: elsewhere than book/, and into the ledger

A cell that raises makes the command fail, and the notebook that was there before stays. There is no cache of cells:
jupyter-cache keys on the notebook alone, so a change in llmlab would leave stale numbers on a page. The key here is
the text, all of llmlab (code and data) and the pins. What differs from run to run without meaning anything (cell ids,
times of execution, how a stream is cut into pieces) is made the same, so equal results give equal bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
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
CELL_TIMEOUT = 300  # seconds; a chapter has 60 on a CPU, and a slower machine than ours should still finish


# Run before and after a chapter with --record. A chapter that measures resets torch's peak: keep what stood before.
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
from llmlab.hardware.host import environment, host
from llmlab.records.lookup import gpu_of
_here = host()
print(json.dumps({
    "device": _here.device,
    "peak_allocated": max(*_peaks, torch.cuda.max_memory_allocated()) if _here.device == "cuda" else None,
    "dtype": llmlab.scale().precision,
    "gpu": gpu_of(_here),
    "environment": environment(),
}))
"""


def sources() -> list[Path]:
    """Return the pages that are notebooks: MyST files whose header names jupytext."""
    return [path for path in sorted(BOOK.glob("*.md")) if path.read_text(encoding="utf-8")[:400].find("jupytext:") > 0]


def read_source(path: Path) -> NotebookNode:
    """Return the notebook that a MyST file describes, without outputs, with ids that depend on its text alone."""
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
    """Return the executed notebook of the MyST file `path`; a cell that raises, raises CellExecutionError.

    `before` and `after` are code for a first and a last cell of their own.
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
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns of its own transport, for every notebook
    )
    client.execute()
    _say_what_pictures_show(notebook)
    notebook.metadata.language_info = NotebookNode(
        {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}
    )
    return notebook


def _say_what_pictures_show(notebook: NotebookNode) -> None:
    """Give each cell its pictures' alternative text: the site reads it there, a figure puts it in the output."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if alt := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell.metadata["mystnb"] = {"image": {"alt": alt}}


def execute_and_record(path: Path) -> NotebookNode:
    """Return the executed notebook, having written the chapter's line of the ledger; pages without a number have none.

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
        print(f"{path.stem}: no CUDA GPU here, so nothing for the ledger")
        return notebook
    from llmlab.records import record_chapter

    print(f"{path.stem}: recorded in {record_chapter(chapter[1], seconds=round(seconds, 1), **facts)}")
    return notebook


def write(notebook: NotebookNode, path: Path) -> None:
    """Write the notebook in one step: a reader never sees half of it."""
    nbformat.validate(notebook)
    unfinished = path.with_suffix(".ipynb.new")
    nbformat.write(notebook, unfinished)
    os.replace(unfinished, path)


def key(path: Path) -> str:
    """Return the hash of all that the notebook's outputs depend on."""
    pins = ROOT / "constraints.txt"
    return stamp.content_hash([path, ROOT / "llmlab", pins, Path(__file__).resolve()], extra=platform.python_version())


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute the book's notebooks.")
    parser.add_argument("names", nargs="*", help="pages without suffix; all when none is given")
    parser.add_argument("--force", action="store_true", help="execute also what is up to date")
    parser.add_argument("--out", type=Path, default=BOOK, metavar="FOLDER", help="where they go; default book/")
    parser.add_argument("--record", action="store_true", help="write each chapter's line of the ledger")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pages = sources()
    if unknown := sorted(set(options.names) - {page.stem for page in pages}):
        parser.error(f"no notebook {', '.join(unknown)}; there are {', '.join(page.stem for page in pages)}")
    failed = []
    for page in pages:
        if options.names and page.stem not in options.names:
            continue
        result = options.out / f"{page.stem}.ipynb"
        mark = STAMPS / options.out.name / f"{page.stem}.notebook"
        # The result is part of what the mark vouches for: one that was changed by hand is made again.
        if not options.force and result.exists() and stamp.is_current(mark, key(page) + stamp.content_hash([result])):
            print(f"{page.stem}: up to date")
            continue
        print(f"{page.stem}: executing ...", flush=True)
        start = time.perf_counter()
        try:
            write((execute_and_record if options.record else execute)(page), result)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{page.stem}: FAILED\n{error}", file=sys.stderr)
            failed.append(page.stem)
            continue
        stamp.write(mark, key(page) + stamp.content_hash([result]))
        print(f"{page.stem}: {time.perf_counter() - start:.0f} s")
    if failed:
        print(f"not executed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
