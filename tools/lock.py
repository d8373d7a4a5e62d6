"""Write constraints.txt: exact versions, for Python 3.10 to 3.13, of all that `make book` and `make test` install.

torch keeps the version in the file; to change it, edit that line and run this again. CUDA's packages (nvidia-*, cuda-*,
triton) are not pinned: torch itself requires exact versions of them, and a CPU build of torch requires none.

uv resolves the versions. Its own uv.lock would not do, because only uv reads it: constraints.txt also serves pip, on
Colab and with another build of torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CUDA = re.compile(r"(nvidia-|cuda-|triton==)")
HEADER = "# Exact versions for `make`; the floors are in pyproject.toml. Made by `make lock`; edit only torch's line.\n"


def main() -> int:
    (torch,) = re.findall(r"^torch==[\w.]+$", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    (extras,) = re.findall(r"^EXTRAS \?= (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        pin = Path(folder, "pin.txt")
        pin.write_text(torch + "\n", "utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--universal"]
        command += ["--python-version", "3.10", "--no-header", "--no-annotate", "--upgrade", "--quiet", "-c", str(pin)]
        command += [flag for extra in extras.split(",") for flag in ("--extra", extra)]
        result = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    lines = [line for line in result.stdout.splitlines() if line and not CUDA.match(line)]
    CONSTRAINTS.write_text(HEADER + "\n".join(lines) + "\n", "utf-8")
    print(f"{CONSTRAINTS.name}: {len(lines)} versions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
