"""Start the experiment `cluster` on this machine by each launcher, and end all its processes.

    run("torchrun", "--steps", "8")     # returns the result that rank 0 prints

A launcher starts processes, numbers them in environment variables, and ends all of them when one fails. Two nodes are
two torchruns that find each other at an address, as on a cluster; here both run on this machine.
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
    by_launcher = {
        "python": [[sys.executable, "-m", SCRIPT]],
        "torchrun": [[*one_node, "-m", SCRIPT]],
        "torchrun, 2 nodes": [[*two_nodes, "--node-rank", str(node), "-m", SCRIPT] for node in (0, 1)],
        "accelerate": [[*accelerate, "-m", SCRIPT]],
        "deepspeed": [["deepspeed", "--num_accelerators", "2", "--master_port", str(port), "--module", SCRIPT]],
    }
    if launcher not in by_launcher:
        raise SpecError(f"launcher={launcher!r} is not one of {', '.join(LAUNCHERS)}")
    return by_launcher[launcher]


def environment(base: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a launcher: `base`, by default that of this process, without the numbers of a rank."""
    variables = os.environ if base is None else base
    inherited = {name: value for name, value in variables.items() if name not in SHOWN}
    scripts = str(Path(sys.executable).parent)  # the launchers are there, and deepspeed looks there for python
    paths = {"PATH": os.pathsep.join([scripts, inherited.get("PATH", "")])}
    package = str(Path(__file__).parents[2])
    paths["PYTHONPATH"] = os.pathsep.join(filter(None, [package, inherited.get("PYTHONPATH")]))
    cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    # After a restart, torchrun's store still has the addresses of dead processes, and a rank that asks too early gets
    # an old one (torch 2.13). This variable gives every start a store of its own.
    return {**inherited, **paths, **loopback(), **cpu, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def run(launcher: str, *arguments: str, restarts: int = 0, limit: float = 240.0) -> dict:
    """Start the experiment with `arguments`; return the result that its rank 0 prints.

    Raises NotAvailable if the launcher is not installed, and RuntimeError, with the last lines of its errors, if the
    launcher of a node fails or takes longer than `limit` seconds. No process is left running.
    """
    text = partial(TemporaryFile, "w+", encoding="utf-8")
    with TemporaryDirectory() as folder, text() as out, text() as errors:
        config = Path(folder) / "accelerate.json"
        config.write_text(json.dumps({**Training(dp=2).to_accelerate(), "use_cpu": True}), "utf-8")
        nodes: list[subprocess.Popen] = []
        try:
            for command in commands(launcher, free_port(), str(config), restarts):
                whole = [*command, *arguments]
                node = subprocess.Popen(whole, env=environment(), stdout=out, stderr=errors, start_new_session=True)
                nodes.append(node)
            codes = _codes(nodes, limit)
        except FileNotFoundError:
            raise NotAvailable(f"{launcher} is not installed: pip install 'llmlab[distributed]'") from None
        finally:
            for node in nodes:
                end(node)
        if any(codes):
            raise RuntimeError(f"{launcher} ended with {codes}\n{_last_lines(errors)}")
        if None in codes:
            raise RuntimeError(f"{launcher} is not done after limit={limit} s\n{_last_lines(errors)}")
        out.seek(0)
        (line,) = [line for line in out if line.startswith('{"ranks"')]
        return json.loads(line)


def _codes(nodes: list[subprocess.Popen], limit: float) -> list[int | None]:
    """Return the exit codes once all nodes have ended, one has failed, or `limit` seconds have passed.

    A node that still runs has None. A node whose partner has failed would wait for it for minutes.
    """
    deadline = time.monotonic() + limit
    while True:
        for node in nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(0.1)
        codes = [node.poll() for node in nodes]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes


def _last_lines(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()[-4000:]


def end(process: subprocess.Popen) -> None:
    """Kill a process that was started in a session of its own, and all its descendants."""
    end_all([process.pid], alive=[process.pid] if process.poll() is None else [])
    process.wait()


def readers(name: str, *packages: str) -> list[str]:
    """Return the `packages` whose distributed Python code contains the environment variable `name`."""
    word, matching = re.compile(rf"(?<!\w){name}(?!\w)"), []
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        root = Path(spec.origin).parent
        files = (root / "distributed" if package == "torch" else root).rglob("*.py")
        if any(word.search(file.read_text("utf-8")) for file in files):
            matching.append(package)
    return matching


def free_port() -> int:
    """Return a port of this machine on which no process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
