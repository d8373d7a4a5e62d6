"""Start N ranks on this machine, each a process of one gloo group, and end all of them as soon as one fails.

    results = launch(function, 2, argument)   # function(argument) runs in every rank; results[rank] is what it returned

The function is one of a module (a file), for a new process imports it by name; what it returns must be plain JSON.
A rank that raises, is killed or keeps the others waiting ends the launch with `RankFailed`, which holds its traceback.
No port is chosen: the ranks find each other through a file, and gloo takes free ports of the loopback interface.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..base.errors import NotAvailable, SpecError
from ..specs.check import check
from ..specs.model import ModelLike
from ..specs.model import model as find_model
from ..specs.run import Training

MOST_RANKS = 64  # of one machine: a rank is a Python with torch, about 0.3 GB
PATIENCE = 10.0  # seconds that one rank may keep the others waiting
START = 120.0  # seconds until all have imported torch and what the function needs
MOST_SECONDS = 10**7  # four months; C++ counts in ns
PRELOADED = ["llmlab.ranks.preload"]
LAST_WORDS = 1.0  # seconds after a failure in which the others may fail too: it shows who was first


class RankFailed(RuntimeError):
    """A rank raised, was killed, or kept the others waiting; `rank` is its number, the message has its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def launch(
    function: Callable[..., Any], ranks: int, *arguments: Any, patience: float = PATIENCE, limit: float | None = None
) -> list[Any]:
    """Run `function(*arguments)` in `ranks` processes that share a gloo group; return what each returned, by rank.

    `patience` is how long, in seconds, a rank may keep the others waiting in a collective or at the end; `limit` ends
    a launch that takes longer in all (None: no limit). In each rank torch has one thread, and RANK, LOCAL_RANK and
    WORLD_SIZE are set as torchrun sets them. Raises SpecError before any process starts for what cannot run, and
    RankFailed, after all processes have ended, where a rank failed.
    """
    work = _checked(function, ranks, arguments, patience, limit)
    _open_standard_files()
    with TemporaryDirectory(prefix="llmlab-ranks-") as name:
        folder = Path(name)
        processes = [
            new_process(_rank, (work, rank, ranks, name, patience), f"rank {rank}")
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, folder, patience, limit)
            return [json.loads(_file(folder, rank, "result").read_text("utf-8")) for rank in range(ranks)]
        finally:
            _end(processes)


def new_process(target: Callable[..., None], arguments: tuple, name: str) -> BaseProcess:
    """Return a process, not yet started, that runs `target(*arguments)` in this process's environment.

    On Linux it is forked from a server that has imported torch; macOS's libraries do not survive a fork. A fork of
    this process would copy torch's locks, locked or not.
    """
    context: Any = get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(PRELOADED)
    return context.Process(target=_run, args=(dict(os.environ), target, *arguments), name=name)


def check_world(model: ModelLike, run: Training, ranks: int) -> None:
    """Raise SpecError, with all degrees in it, unless `run` cuts the model evenly and its degrees make `ranks` ranks.

    For the script that submits a job: what is wrong then costs seconds, not a place in the queue.
    """
    spec = find_model(model)
    degrees = " × ".join(f"{name}={getattr(run, name)}" for name in ("dp", "tp", "pp", "cp"))
    if run.ep > 1:
        degrees += f", ep={run.ep} among dp"
    rest = run.tp * run.pp * run.cp
    if run.world_size != ranks:
        fits = f"give dp={ranks // rest}" if ranks % rest == 0 else f"tp × pp × cp = {rest} does not divide {ranks}"
        raise SpecError(f"{degrees} are {run.world_size} ranks, and {ranks} are started: {fits}")
    try:
        check(spec, run)
        if spec.kv_heads % run.tp:
            raise SpecError(f"tp={run.tp} does not divide {spec.name}'s {spec.kv_heads} key-value heads")
    except SpecError as error:
        raise SpecError(f"{error} ({degrees})") from None


def _checked(function: Callable, ranks: int, arguments: tuple, patience: float, limit: float | None) -> bytes:
    """Return function and arguments pickled, or raise for what cannot be launched."""
    if not hasattr(signal, "SIGUSR1"):
        raise NotAvailable("ranks are started with POSIX signals; on Windows, run this in WSL")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
        raise SpecError(f"ranks={ranks!r} is not a whole number from 1 to {MOST_RANKS}")
    for name, seconds in (("patience", patience), ("limit", limit)):
        if seconds is not None and not (isinstance(seconds, (int, float)) and 0 < seconds <= MOST_SECONDS):
            raise SpecError(f"{name}={seconds!r} is not above 0 seconds, and {MOST_SECONDS} s or less")
    if (world := os.environ.get("WORLD_SIZE") or "1") != "1":
        rank = os.environ.get("RANK")
        raise SpecError(f"this is already rank {rank} of {world}; start it with python, not with torchrun")
    if getattr(function, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise SpecError(f"{function!r} is of a notebook or prompt, where no new process finds it; put it in a file")
    try:
        return pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SpecError(f"{function!r} cannot be sent to a new process: {error}; use a function of a module") from None


def _open_standard_files() -> None:
    """Open those of input, output and errors that are closed: a pipe to a rank would get the number, and be lost."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free


def _file(folder: str | Path, rank: int, kind: str) -> Path:
    return Path(folder) / f"{rank}.{kind}"


# ---- in each rank


def _run(environment: dict[str, str], target: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()  # the server's is of the first launch
    os.environ.update(environment)
    gc.freeze()  # what was imported is no garbage, and its memory stays the server's
    target(*arguments)


def _rank(work: bytes, rank: int, ranks: int, folder: str, patience: float) -> None:
    os.setsid()  # what this rank starts is in its group, and ends with it
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    log = os.open(_file(folder, rank, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)  # what ranks print would mix with the caller's output
    os.dup2(log, 2)
    stack = open(_file(folder, rank, "stack"), "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack)  # also answers from within C
    faulthandler.enable()  # to the log: gloo aborts the process where ranks send different sizes
    code = 0
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ["OMP_NUM_THREADS"] = "1"  # else each rank's libraries start one thread per core
        _join(rank, ranks, folder, patience)
        function, arguments = pickle.loads(work)
        result = json.dumps(function(*arguments))
        _leave()
        _write(_file(folder, rank, "result"), result)
    except BaseException:
        code = 1
        # Written before the sockets close: the others fail later than this one, and their files are younger.
        with suppress(OSError):  # a full disk
            _write(_file(folder, rank, "error"), json.dumps([time.time(), traceback.format_exc()]))
    with suppress(OSError, ValueError, AttributeError):  # the function closed them, or the disk is full
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # an interpreter that shuts down waits for threads, which may wait for a rank that is gone


def _end_with_parent(folder: str) -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)  # a launcher that was killed could not
    os.killpg(0, signal.SIGKILL)


def _join(rank: int, ranks: int, folder: str, patience: float) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    torch.set_num_threads(1)  # ranks share the cores; and sums are in the same order everywhere
    for variable, value in loopback().items():
        os.environ.setdefault(variable, value)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    store.set(f"here {rank}", "")
    store.wait([f"here {other}" for other in range(ranks)], timedelta(seconds=START))
    # new_group and DeviceMesh, told nothing, take torch's 30 minutes and not what the whole group was given.
    distributed_c10d.default_pg_timeout = timedelta(seconds=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=patience))


def loopback() -> dict[str, str]:
    """Return the variable that makes gloo talk within this machine; without it gloo looks up the host's name."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _leave() -> None:
    import torch.distributed as dist

    dist.barrier()  # nobody closes a connection that another still reads from
    dist.destroy_process_group()


def _write(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text, "utf-8")
    os.replace(unfinished, path)


# ---- in the process that launched them


def _wait(processes: Sequence[BaseProcess], folder: Path, patience: float, limit: float | None) -> None:
    """Return when every rank has left a result; raise RankFailed as soon as one has ended without."""
    deadlines = {} if limit is None else {f"not done after limit={limit} s": time.monotonic() + limit}
    while True:
        alive = [process for process in processes if process.exitcode is None]
        ended = [rank for rank, process in enumerate(processes) if process not in alive]
        if any(not _file(folder, rank, "result").exists() for rank in ended):
            _raise_first(processes, folder)
        if not alive:
            return
        if ended:  # the ranks met before the first could end: the others follow at once
            deadlines.setdefault(f"still running {patience} s after others ended", time.monotonic() + patience)
        why, deadline = min(deadlines.items(), key=lambda item: item[1], default=("", None))
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not connection.wait([process.sentinel for process in alive], left):
            rank, stack = _hanging([processes.index(process) for process in alive], processes, folder)
            raise RankFailed(rank, f"{why}\n{stack}")


def _raise_first(processes: Sequence[BaseProcess], folder: Path) -> None:
    """Raise RankFailed for the rank that failed first: the others failed because it had."""
    deadline = time.monotonic() + LAST_WORDS
    while alive := [process for process in processes if process.exitcode is None]:
        if not connection.wait([process.sentinel for process in alive], max(0.0, deadline - time.monotonic())):
            break
    errors = {}
    for rank, process in enumerate(processes):
        if process.exitcode is None or _file(folder, rank, "result").exists():
            continue
        if not _file(folder, rank, "error").exists():  # it had no time to say why
            code = process.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            log = _file(folder, rank, "log")
            end = _end_of(log, 4000) if log.exists() else ""
            raise RankFailed(rank, f"rank {rank} {how} and left no result\n{end}".rstrip())
        errors[rank] = json.loads(_file(folder, rank, "error").read_text("utf-8"))
    first = min(errors, key=lambda rank: errors[rank][0])
    message = errors[first][1]
    late = [rank for rank, process in enumerate(processes) if process in alive]
    if late and "timed out" in message.splitlines()[-1].lower():  # it waited for one that is still running
        rank, stack = _hanging(late, processes, folder)
        raise RankFailed(rank, f"rank {rank} kept rank {first} waiting\n{stack}\nrank {first} waited:\n{message}")
    raise RankFailed(first, f"rank {first} raised\n{message}")


def _end_of(path: Path, most: int) -> str:
    """Return the last characters of a file of any size, without faulthandler's list of extension modules."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4 * most))
        lines = file.read(4 * most).decode(errors="replace").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Extension modules: "))[-most:]


def _hanging(late: list[int], processes: Sequence[BaseProcess], folder: Path) -> tuple[int, str]:
    """Return which of the ranks that still run the others wait for, and where it is, as faulthandler writes it.

    Some of these may wait themselves, in groups that began later: the first that is not in a collective hangs. A
    stopped process does not answer.
    """
    paths = {rank: _file(folder, rank, "stack") for rank in late}
    asked = [rank for rank in late if paths[rank].exists() and processes[rank].pid is not None]
    for rank in asked:
        os.kill(processes[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
    logs: dict[int, str] = {}
    for _ in range(20):
        logs = {rank: paths[rank].read_text("utf-8") for rank in asked}
        silent = [processes[rank].sentinel for rank in asked if "Current thread" not in logs[rank]]
        if not silent:
            break
        connection.wait(silent, 0.05)
    waits = f"{os.sep}torch{os.sep}distributed{os.sep}"
    rank = next((rank for rank in late if waits not in logs.get(rank, "")), late[0])
    if rank not in asked:
        return rank, f"rank {rank} has not started yet"
    return rank, f"rank {rank} is at\n{logs[rank] or '  (no answer: the process is stopped)'}"


def _end(processes: Sequence[BaseProcess]) -> None:
    pids = {process.pid: process for process in processes if process.pid is not None}
    end_all(list(pids), alive=[pid for pid, process in pids.items() if process.exitcode is None])
    for process in pids.values():
        process.join()
        process.close()


def end_all(leaders: list[int], alive: list[int]) -> None:
    """Kill the process groups of `leaders`, those of them that are `alive`, and all that came from these.

    Some of that has groups of its own, which outlive their parents: ninja's compilers, the workers of torchrun.
    """
    family = set(alive)
    try:
        if alive:
            import psutil

            for child in psutil.Process().children(recursive=True):  # a parent comes before its children
                with suppress(psutil.NoSuchProcess):
                    if child.ppid() in family:
                        family.add(child.pid)
    finally:  # also where a second Ctrl-C comes
        for pid in {*leaders, *family}:
            with suppress(ProcessLookupError, PermissionError):  # it leads none, or all of it are gone
                os.killpg(pid, signal.SIGKILL)
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
