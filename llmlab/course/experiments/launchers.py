"""Start the experiment `cluster` by each launcher, on this machine, and end all that it started.

    run("torchrun", "--steps", "8")     # what rank 0 printed

A launcher starts processes, tells each its number in environment variables, and ends all of them when one fails. Two
`nodes` are two torchruns that find each other at an address, as on a cluster; here both are on this machine.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from ...base.errors import NotAvailable, SpecError
from ...ranks.launch import end_all, loopback
from ...specs.run import Training
from .cluster import SHOWN

SCRIPT = "llmlab.course.experiments.cluster"
LAUNCHERS = ("python", "torchrun", "torchrun, 2 nodes", "accelerate", "deepspeed")
BATCH_FILE = Path(__file__).with_name("cluster.sbatch")


def commands(launcher: str, port: int, accelerate_config: str = "", restarts: int = 0) -> list[list[str]]:
    """Return the command of each node. Together they start two ranks, and "python" starts one. Raises SpecError for an
    unknown launcher.

    After a failure, torchrun starts all ranks again, at most `restarts` times. accelerate reads `accelerate_config`.
    """
    one_node = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    two_nodes = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    two_nodes += ["--master-port", str(port)]
    accelerate = ["accelerate", "launch", "--config_file", accelerate_config, "--main_process_port", str(port)]
    each = {
        "python": [[sys.executable, "-m", SCRIPT]],
        "torchrun": [[*one_node, "-m", SCRIPT]],
        "torchrun, 2 nodes": [[*two_nodes, "--node-rank", str(node), "-m", SCRIPT] for node in (0, 1)],
        "accelerate": [[*accelerate, "-m", SCRIPT]],
        "deepspeed": [["deepspeed", "--num_accelerators", "2", "--master_port", str(port), "--module", SCRIPT]],
    }
    if launcher not in each:
        raise SpecError(f"launcher={launcher!r} is not one of {', '.join(LAUNCHERS)}")
    return each[launcher]


def environment(base: dict[str, str] | None = None) -> dict[str, str]:
    """Return `base`, or this process's environment, for ranks on this machine's CPU, numbered by nobody yet."""
    given = os.environ if base is None else base
    kept = {name: value for name, value in given.items() if name not in SHOWN}
    here = str(Path(sys.executable).parent)  # the launchers are there, and deepspeed looks there for python
    paths = {"PATH": os.pathsep.join([here, kept.get("PATH", "")])}
    package = str(Path(__file__).parents[2])
    paths["PYTHONPATH"] = os.pathsep.join([package, kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [package])
    cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    # After a restart torchrun's store still has the addresses of the dead, and a rank that asks before its neighbour
    # has written a new one gets the old (torch 2.13): give every start a store of its own.
    return {**kept, **paths, **loopback(), **cpu, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def run(launcher: str, *arguments: str, restarts: int = 0, limit: float = 240.0) -> dict:
    """Start the experiment with `arguments`; return what its rank 0 printed.

    Raises NotAvailable where the launcher is not installed, RuntimeError, with what was said, where a node's launcher
    failed or took longer than `limit` seconds. Nothing that was started is left running.
    """
    text = partial(TemporaryFile, "w+", encoding="utf-8")
    with TemporaryDirectory() as folder, text() as out, text() as errors:
        config = Path(folder) / "accelerate.json"
        config.write_text(json.dumps({**Training(dp=2).to_accelerate(), "use_cpu": True}), "utf-8")
        nodes: list[subprocess.Popen] = []
        try:
            for command in commands(launcher, free_port(), str(config), restarts):
                whole = [*command, *arguments]
                start = subprocess.Popen(whole, env=environment(), stdout=out, stderr=errors, start_new_session=True)
                nodes.append(start)
            codes = _codes(nodes, limit)
        except FileNotFoundError:
            raise NotAvailable(f"{launcher} is not installed: pip install 'llmlab[distributed]'") from None
        finally:
            for node in nodes:
                end(node)
        if any(codes):
            raise RuntimeError(f"{launcher} ended with {codes}\n{_said(errors)}")
        if None in codes:
            raise RuntimeError(f"{launcher} is not done after limit={limit} s\n{_said(errors)}")
        out.seek(0)
        (line,) = [line for line in out if line.startswith('{"ranks"')]
        return json.loads(line)


def _codes(nodes: list[subprocess.Popen], limit: float) -> list[int | None]:
    """Return the exit codes when all have ended, or one has failed, or `limit` seconds are over; None: it still runs.

    A node whose partner has failed waits for it, minutes long.
    """
    deadline = time.monotonic() + limit
    while True:
        for node in nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(0.1)
        codes = [node.poll() for node in nodes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes


def _said(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()[-4000:]


def end(process: subprocess.Popen) -> None:
    """Kill what is left of a process started in a session of its own, and of all that came from it."""
    end_all([process.pid], alive=[process.pid] if process.poll() is None else [])
    process.wait()


def readers(name: str, *packages: str) -> list[str]:
    """Return the `packages` whose distributed Python code contains the environment variable `name`."""
    word, found = re.compile(rf"(?<!\w){name}(?!\w)"), []
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        root = Path(spec.origin).parent
        files = (root / "distributed" if package == "torch" else root).rglob("*.py")
        if any(word.search(file.read_text("utf-8")) for file in files):
            found.append(package)
    return found


def free_port() -> int:
    """Return a port of this machine on which nobody listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
