"""The command nvidia-smi, for scripts that call it: it names the simulated GPU, and says that there is no driver."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from ..hardware.gpu import GPU

NO_DRIVER = 9  # its exit code if it cannot reach the driver: nvidia-smi(1)


@contextmanager
def nvidia_smi(gpu: GPU) -> Iterator[None]:
    """Put the command first on the PATH. It fails if it is called with any argument, such as --query-gpu."""
    text = f"{gpu.name}, {gpu.memory >> 20} MiB, simulated by llmlab run: there is no driver to ask"
    with tempfile.TemporaryDirectory(prefix="llmlab-bin-") as folder:
        command = Path(folder, "nvidia-smi")
        lines = ["#!/bin/sh", f"[ $# -eq 0 ] && echo 'NVIDIA-SMI {text}' && exit", f"echo '{text}' >&2"]
        command.write_text("\n".join([*lines, f"exit {NO_DRIVER}", ""]), "utf-8")
        command.chmod(0o755)
        path = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
        with mock.patch.dict(os.environ, {"PATH": path}):
            yield
