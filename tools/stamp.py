"""Run a command only if its inputs have changed: `python tools/stamp.py STAMP PATH... -- COMMAND...`

The stamp file has a hash of the command and of the contents of the paths (all files in a folder). Modification times,
which make compares, would not do: in a fresh clone they are arbitrary.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

SKIPPED = {"__pycache__", ".ipynb_checkpoints"}


def content_hash(paths: list[Path], extra: str = "") -> str:
    """Return a hex digest of `extra` and of the names and contents of `paths`; a folder means all files in it."""
    digest = hashlib.sha256(extra.encode())
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            if not SKIPPED.intersection(file.parts):
                digest.update(f"{file.as_posix()}\0{file.stat().st_size}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def is_current(stamp: Path, digest: str) -> bool:
    """Return whether `stamp` was written for `digest`."""
    return stamp.exists() and stamp.read_text("utf-8").strip() == digest


def write(stamp: Path, digest: str) -> None:
    """Record in the file `stamp` that its command has succeeded for the inputs with `digest`."""
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest + "\n", "utf-8")


def main(arguments: list[str]) -> int:
    split = arguments.index("--")
    stamp, paths, command = Path(arguments[0]), [Path(p) for p in arguments[1:split]], arguments[split + 1 :]
    digest = content_hash(paths, extra="\0".join(command))
    if is_current(stamp, digest):
        print(f"{stamp.name}: up to date")
        return 0
    stamp.unlink(missing_ok=True)
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        write(stamp, digest)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
