"""Run one stage of `make` and write down what it took: `python tools/stage.py NAME -- COMMAND...`

The seconds go to _build/durations/NAME.json; where pytest runs, the Makefile has it write each test's to NAME.xml
beside it. A stage that fails says what to do, as far as that can be known from here: in what a tool prints, a full disk
or an interruption looks like any other error. Without arguments: print what the last run of each stage took, and the
slowest tests.
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
FULL = 50 * 2**20  # bytes: with less than this free, a failure is likely the disk's


def wait(process: subprocess.Popen) -> int:
    """Return the exit code of `process`; a Ctrl-C reached it too, so it is left to end by itself first."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def run(name: str, command: list[str]) -> int:
    """Run `command`, record its seconds, and return its exit code; 130 where it was interrupted."""
    start = time.monotonic()
    try:
        DURATIONS.mkdir(parents=True, exist_ok=True)
        code = wait(subprocess.Popen(command))
        took = {"seconds": round(time.monotonic() - start, 1), "exit": code}
        (DURATIONS / f"{name}.json").write_text(json.dumps(took))
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
    """Return the seconds of each test in pytest's XML; a notebook's cells count as one, and so do a test's cases."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "")
        if "::" not in case.get("name", "") and not case.get("name", "").startswith("Cell "):
            name += "::" + case.get("name", "").partition("[")[0]
        found[name] += float(case.get("time", 0))
    return found


def show() -> None:
    """Print the stages' seconds, then each one's slowest tests."""
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
