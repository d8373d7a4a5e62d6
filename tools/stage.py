"""Run one stage of `make` and record its duration: `python tools/stage.py NAME -- COMMAND...`

The seconds go to _build/durations/NAME.json; for stages that run pytest, the Makefile makes it write each test's time
to NAME.xml in the same folder. If a stage fails because of a full disk or an interruption, a line says what to do: the
tool's own messages do not show these causes. Without arguments: print the duration of the last run of each stage, and
the slowest tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

DURATIONS = Path("_build") / "durations"
SLOWEST = 15
FULL = 50 * 2**20  # bytes: with less free space than this, a full disk is the likely cause of a failure


def wait(process: subprocess.Popen) -> int:
    """Return the exit code of `process`; on Ctrl-C, which reaches `process` too, wait until it has ended."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def run(name: str, command: list[str]) -> int:
    """Run `command`, record its seconds, and return its exit code, 130 after an interruption."""
    start = time.monotonic()
    try:
        DURATIONS.mkdir(parents=True, exist_ok=True)
        code = wait(subprocess.Popen(command))
        record = {"seconds": round(time.monotonic() - start, 1), "exit": code}
        (DURATIONS / f"{name}.json").write_text(json.dumps(record))
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted. Run the same command again: what was finished is kept.", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = 1
    if code and shutil.disk_usage(".").free < FULL:
        print(f"{name}: the disk of {os.getcwd()} is full. Free some space, then run the same command again.",
              file=sys.stderr)  # fmt: skip
    return code


def slowest(report: Path) -> Counter[str]:
    """Return the seconds of each test in pytest's XML; all cells of a notebook, and all cases of a test, are summed."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "")
        if "::" not in case.get("name", "") and not case.get("name", "").startswith("Cell "):
            name += "::" + case.get("name", "").partition("[")[0]
        seconds[name] += float(case.get("time", 0))
    return seconds


def show() -> None:
    """Print the seconds of each stage, then the slowest tests of each."""
    stages = {path.stem: json.loads(path.read_text()) for path in sorted(DURATIONS.glob("*.json"))}
    for name, took in stages.items():
        print(f"{name:10} {took['seconds']:7.0f} s{'' if took['exit'] == 0 else '   failed'}")
    print(f"{'sum':10} {sum(took['seconds'] for took in stages.values()):7.0f} s")
    for report in sorted(DURATIONS.glob("*.xml")):
        print(f"\n{report.stem}: the slowest")
        for name, seconds in slowest(report).most_common(SLOWEST):
            print(f"{seconds:7.1f} s  {name}")


def main(arguments: list[str]) -> int:
    if not arguments:
        show()
        return 0
    name, separator, *command = arguments
    assert separator == "--" and command, __doc__
    return run(name, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
