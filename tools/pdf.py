"""The book as one file to print: `python tools/pdf.py OUT.pdf`. Needs Chromium or Chrome, and no network.

Sphinx renders all pages as one, from the notebooks as they were committed, and the browser prints that on A4.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "_build" / "print"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer")
PATIENCE = 60_000  # ms of the page's own time, in which its scripts draw the formulas


def main(out: str) -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed: one of them prints the book", file=sys.stderr)
        return 2
    book = Path(sys.executable).with_name("jupyter-book")
    build = [book, "build", ROOT, "--builder", "singlehtml", "--path-output", FOLDER, "-W", "-n", "--keep-going", "-q"]
    subprocess.run(list(map(str, build)), cwd=ROOT, check=True)
    made = FOLDER / "_build" / "singlehtml"
    page = made / "print.html"  # the builder writes the first page's links as if it were in the site's root
    shutil.copy(made / "book" / "intro.html", page)
    target = Path(out).resolve()
    printed = [browser, *FLAGS, f"--virtual-time-budget={PATIENCE}", f"--print-to-pdf={target}", page.as_uri()]
    subprocess.run(printed, check=True, stderr=subprocess.DEVNULL)
    print(f"{target}: {target.stat().st_size / 2**20:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
