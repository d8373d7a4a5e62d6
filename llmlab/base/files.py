"""Files: writing those that others read, and whose code one holds."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

OURS = os.path.dirname(os.path.dirname(__file__))


@cache
def is_library(file: str) -> bool:
    """Return whether code in `file`, of this machine or another, is a library's, Python's or ours, not the user's."""
    pieces = ("site-packages", "dist-packages", "/lib/python3", "torchinductor_")
    return any(piece in file for piece in pieces) or file.startswith((sys.base_prefix, OURS, "<frozen"))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path` so that a reader, or a crash, sees the old file or the whole new one.

    Folders that are not there are made. Two processes that write at once both succeed; the later one's file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name on an empty file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
