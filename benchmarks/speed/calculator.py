"""How long the calculator of the book takes in a browser: its first result, an update, a plan; and how large it is.

    make site && python -m benchmarks.speed.calculator              # prints; needs Chromium
    python -m benchmarks.speed.calculator --out benchmarks/results  # and writes calculator.md, which the book includes

The exit code is 1 if a bar is missed. Timings depend on the machine and the moment: no test asserts them.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click

from benchmarks.provenance import provenance, table, write
from benchmarks.speed.speed import HEADER, Row, pace
from llmlab.base.tables import Table, show

SITE = Path(__file__).parents[2] / "_build" / "html"
PAGE = "book/will-it-fit.html"
LOADED = ("_static/pyodide", "_static/calculator", "_static/llmlab.zip")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FIRST_BAR, UPDATE_BAR, SIZE_BAR = 5.0, 0.1, 30.0  # s, s, MiB
STARTS, UPDATES, PLANS = 3, 20, 3
# Types into a field, and resolves with the milliseconds until the answer stands on the page.
TYPED = """value => new Promise(done => {
  const field = document.querySelector('#llmlab-micro_batch'), start = performance.now();
  new MutationObserver((_, seen) => { seen.disconnect(); done(performance.now() - start); })
    .observe(document.querySelector('#calculator .result'), { childList: true });
  field.value = value;
  field.dispatchEvent(new Event('input', { bubbles: true }));
})"""
PLANNED = "#kind=planning&gpus=8"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


def size() -> float:
    """Return the MiB that the page loads, as they lie on disk, uncompressed."""
    paths = [SITE / name for name in LOADED]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return sum(file.stat().st_size for file in files) / 2**20


def opened(browser: Any, address: str, wanted: str) -> tuple[Any, float]:
    """Return a new tab at `address`, and the seconds until `wanted` stands on it; nothing is cached before."""
    page = browser.new_context().new_page()
    start = perf_counter()
    page.goto(address)
    page.wait_for_selector(wanted, timeout=300_000)
    return page, perf_counter() - start


def measured(site: str) -> list[Row]:
    """Return the rows of the table."""
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        firsts, plans = [], []
        for _ in range(STARTS):
            page, seconds = opened(browser, site + PAGE, "#calculator .bar")
            firsts.append(seconds)
        updates = [page.evaluate(TYPED, str(number)) / 1e3 for number in range(2, 2 + UPDATES)]
        for _ in range(PLANS):
            # Python is there: the search alone, from the click on "planning" on.
            page.evaluate("address => { location.hash = address }", "#gpus=8")
            page.wait_for_selector("#calculator[data-answers='#gpus=8']")
            start = perf_counter()
            page.evaluate("address => { location.hash = address }", PLANNED)
            page.wait_for_selector(f"#calculator[data-answers='{PLANNED}']", timeout=300_000)
            plans.append(perf_counter() - start)
        browser.close()
    first, update, large = median(firsts), median(updates), size()
    waiting = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else "unknown"
    return [
        Row("programs running or waiting during the test (load average)", waiting),
        Row("ten million additions in a Python loop, as a measure of this machine", f"{pace():.2f} s"),
        Row(f"from opening the page to its first result, median of {STARTS}", f"{first:.1f} s", f"< {FIRST_BAR:g} s",
            first < FIRST_BAR),
        Row(f"from a key press to the new numbers, median of {UPDATES}", f"{update * 1e3:.0f} ms",
            f"< {UPDATE_BAR * 1e3:.0f} ms", update < UPDATE_BAR),
        Row("the slowest of these", f"{max(updates) * 1e3:.0f} ms"),
        Row(f"a plan for Llama-3.1-8B on 8xH100-80GB, median of {PLANS}", f"{median(plans):.1f} s"),
        Row("size of the files that the page loads, uncompressed", f"{large:.1f} MiB", f"< {SIZE_BAR:g} MiB",
            large < SIZE_BAR),
    ]  # fmt: skip


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write calculator.md to.")
def main(out: Path | None) -> None:
    """Time the calculator of the built site in headless Chromium; exit 1 where a bar is missed."""
    if not (SITE / "_static" / "pyodide").exists():
        raise click.ClickException("no calculator in _build/html: run `make site`, which downloads Pyodide")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        rows = measured(f"http://127.0.0.1:{server.server_port}/")
    finally:
        server.shutdown()
    cells = [row.cells() for row in rows]
    show(Table(HEADER, cells, "The calculator, in Chromium"))
    if out:
        write(out / "calculator.md", "\n".join([*table(HEADER, cells), "", provenance("llmlab", "playwright")]))
    sys.exit(any(row.within is False for row in rows))


if __name__ == "__main__":
    main()
