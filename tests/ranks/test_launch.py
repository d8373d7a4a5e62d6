"""A launch gives every rank's result, or ends: with the traceback of the rank that failed, and nothing left running."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from llmlab.base.errors import SpecError
from llmlab.ranks import launch as module
from llmlab.ranks.launch import RankFailed, check_world, launch
from llmlab.specs.run import Training

GONE = 30  # seconds after which a process that should be gone is not; it is not what the test waits


def sum_of_ranks(offset):
    import torch
    import torch.distributed as dist

    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    print("what a rank prints does not reach the caller")
    return {"rank": dist.get_rank(), "sum": total.item(), "RANK": os.environ["RANK"]}


def fail(how, folder):
    """Rank 1 fails; rank 0 waits for it. Both leave what they hold in `folder`."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))  # all are there, all are connected
    apart = dist.get_rank() == 1 and how == "hangs"  # as a compiler is that ninja started: killing the group is less
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=apart)
    listening = [c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    path = Path(folder) / f"{dist.get_rank()}.json"
    path.with_suffix(".new").write_text(json.dumps({"pids": [os.getpid(), child.pid], "ports": listening}))
    path.with_suffix(".new").rename(path)
    dist.barrier()
    if dist.get_rank() == 1 or how == "nobody returns":
        if how == "raises":
            raise ValueError("this rank's own words")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        where_it_hangs()
    dist.all_reduce(torch.ones(1))


def sizes_that_differ():
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1000 * (3 + dist.get_rank())))


def hangs_in_a_group_of_some_ranks():
    """Rank 2 hangs, rank 1 waits for it in a group of two, and rank 0 for rank 1 in one with more patience."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    patient, pair = dist.new_group([0, 1], timeout=timedelta(seconds=600)), dist.new_group([1, 2])
    dist.barrier()
    if dist.get_rank() == 2:
        where_it_hangs()
    dist.all_reduce(torch.ones(1), group=pair if dist.get_rank() else patient)


def one_stops_after_the_last_barrier():
    """Rank 1 is stopped as it writes its result: the other has long gone."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        module._write = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)


def closes_its_output():
    threading.Thread(target=where_it_hangs).start()  # an interpreter that shut down would wait for it
    print("something that is still to be flushed", end="")
    os.close(1)
    sys.stderr.close()
    return "done"


def prints_much_and_is_killed():
    print("x" * 2**20, end=" the last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def where_it_hangs():
    while True:
        time.sleep(1)


def assert_nothing_left(folder):
    for rank in (0, 1):
        data = json.loads((Path(folder) / f"{rank}.json").read_text())
        for pid in data["pids"]:
            assert not running(pid)
        assert data["ports"], "gloo listens somewhere"
        for port in data["ports"]:
            with socket.socket() as taken:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(("127.0.0.1", port))  # raises where somebody still listens


def running(pid):
    try:
        process = psutil.Process(pid)
        return bool(psutil.wait_procs([process], timeout=GONE)[1]) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_results_come_back_by_rank_and_output_does_not_mix(capfd):
    assert launch(sum_of_ranks, 2, 10) == [{"rank": r, "sum": 21, "RANK": str(r)} for r in (0, 1)]
    assert "does not reach" not in capfd.readouterr().out


def test_a_rank_that_raises_ends_the_launch_with_its_traceback(tmp_path):
    with pytest.raises(RankFailed, match="rank 1 raised") as failed:
        launch(fail, 2, "raises", str(tmp_path))
    assert failed.value.rank == 1
    assert "ValueError: this rank's own words" in str(failed.value) and "in fail" in str(failed.value)
    assert_nothing_left(tmp_path)


def test_a_rank_that_is_killed_is_named_not_the_one_that_lost_its_connection(tmp_path):
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL") as failed:
        launch(fail, 2, "is killed", str(tmp_path))
    assert failed.value.rank == 1
    assert_nothing_left(tmp_path)


def test_a_rank_that_hangs_is_named_with_the_line_it_hangs_at(tmp_path):
    with pytest.raises(RankFailed, match="rank 1 kept rank 0 waiting") as failed:
        launch(fail, 2, "hangs", str(tmp_path), patience=3)
    assert failed.value.rank == 1
    assert "where_it_hangs" in str(failed.value), "the stack of the rank that hangs"
    assert "all_reduce" in str(failed.value), "and where the other waits"
    assert_nothing_left(tmp_path)


def test_a_rank_that_hangs_is_named_where_only_some_ranks_wait_for_it():
    """torch gives a new group 30 minutes, whatever the whole group has."""
    with pytest.raises(RankFailed, match="rank 2 kept rank 1 waiting") as failed:
        launch(hangs_in_a_group_of_some_ranks, 3, patience=3, limit=600)
    assert failed.value.rank == 2 and "where_it_hangs" in str(failed.value)


def test_a_rank_that_hangs_when_others_have_ended_is_named():
    with pytest.raises(RankFailed, match="still running 3 s after others ended") as failed:
        launch(one_stops_after_the_last_barrier, 2, patience=3)
    assert failed.value.rank == 1 and "the process is stopped" in str(failed.value)


def test_a_rank_may_close_its_output():
    assert launch(closes_its_output, 1, limit=600) == ["done"]


def test_of_a_rank_that_prints_much_the_end_is_shown():
    with pytest.raises(RankFailed, match="was killed by SIGKILL") as failed:
        launch(prints_much_and_is_killed, 1)
    assert str(failed.value).endswith("x the last words") and len(str(failed.value)) < 5000


def test_sizes_that_differ_between_ranks_end_the_launch_and_are_named():
    """gloo aborts the process: no Python exception, but the stack all the same."""
    with pytest.raises(RankFailed, match="was killed by SIGABRT") as failed:
        launch(sizes_that_differ, 2, patience=5)
    assert "4000 vs 3000" in str(failed.value)
    assert "in sizes_that_differ" in str(failed.value)


@pytest.mark.parametrize(
    ("run", "ranks", "words"),
    [
        (
            Training(dp=2, tp=2, pp=3),
            16,
            "dp=2 × tp=2 × pp=3 × cp=1 are 12 ranks, and 16 are started: tp × pp × cp = 6",
        ),
        (Training(dp=2, tp=2, pp=2), 16, "are 8 ranks, and 16 are started: give dp=4"),
        (Training(dp=2, tp=5), 10, "dp=2 × tp=5 × pp=1 × cp=1"),
        (Training(dp=2, pp=24), 48, "12 layers"),
        (Training(cp=3, seq_len=1000), 3, "dp=1 × tp=1 × pp=1 × cp=3"),
    ],
)
def test_a_world_that_cannot_be_is_refused_with_all_its_degrees(run, ranks, words):
    with pytest.raises(SpecError, match=re.escape(words)) as refused:
        check_world("gpt2", run, ranks)
    for degree in ("dp", "tp", "pp", "cp"):
        assert f"{degree}={getattr(run, degree)}" in str(refused.value)


def test_key_heads_are_cut_too():
    """Each rank's query heads need their key head, and the model has fewer of those."""
    words = "tp=16 does not divide meta-llama/Llama-3.1-8B's 8 key-value heads (dp=2 × tp=16 × pp=1 × cp=1)"
    with pytest.raises(SpecError, match=re.escape(words)):
        check_world("meta-llama/Llama-3.1-8B", Training(dp=2, tp=16), 32)


def test_a_world_that_can_be_passes():
    assert check_world("meta-llama/Llama-3.1-405B", Training(dp=128, tp=8, pp=16), 16384) is None


def program(code, folder):
    """A process of its own that runs `code`, which may import this file."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(folder)}
    return {"args": [sys.executable, "-c", f"if __name__ == '__main__':\n    {code}"], "env": environment}


def test_a_launch_needs_no_input_output_and_errors(tmp_path):
    """Where they are closed the system gives their numbers to the next files that are opened: pipes to the ranks."""
    (tmp_path / "ten.py").write_text("def ten():\n    return 10\n")  # importing this file would open others first
    script = tmp_path / "script.py"
    script.write_text(
        "from ten import ten\nfrom llmlab.ranks.launch import launch\n"
        "if __name__ == '__main__':\n    found = str(launch(ten, 2, limit=600))\n"  # before any file is open
        f"    open({str(tmp_path / 'found')!r}, 'w').write(found)\n"
    )
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, str(script)]
    assert subprocess.run(closed, env=program("", tmp_path)["env"], timeout=900).returncode == 0
    assert (tmp_path / "found").read_text() == "[10, 10]"


def test_ranks_end_with_the_process_that_launched_them(tmp_path):
    """Even where that is killed and can tidy nothing up."""
    code = f"import test_launch as t; t.launch(t.fail, 2, 'nobody returns', {str(tmp_path)!r}, patience=600)"
    parent = subprocess.Popen(**program(code, tmp_path))
    try:
        while not all((tmp_path / f"{rank}.json").exists() for rank in (0, 1)):
            with pytest.raises(subprocess.TimeoutExpired):  # it runs, and goes on running
                parent.wait(0.1)
    finally:
        parent.kill()
        parent.wait()
    assert_nothing_left(tmp_path)
    assert not list(tmp_path.glob("llmlab-ranks-*"))


def test_a_launch_that_takes_longer_than_its_limit_ends():
    with pytest.raises(RankFailed, match=r"not done after limit=0\.1 s"):
        launch(where_it_hangs, 2, limit=0.1)
    assert not [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("arguments", "keywords", "named"),
    [
        ((sum_of_ranks, 0), {}, "ranks=0"),
        ((sum_of_ranks, True), {}, "ranks=True"),
        ((sum_of_ranks, 2.0), {}, "ranks=2.0"),
        ((sum_of_ranks, 65), {}, "ranks=65"),
        ((sum_of_ranks, 2, 1), {"patience": 0}, "patience=0"),
        ((sum_of_ranks, 2, 1), {"limit": -1}, "limit=-1"),
        ((sum_of_ranks, 2, 1), {"patience": float("inf")}, "patience=inf"),
        ((sum_of_ranks, 2, 1), {"limit": "10"}, "limit='10'"),
        ((lambda: 1, 2), {}, "a function of a module"),
        ((sum_of_ranks, 2, (i for i in "a generator")), {}, "cannot be sent"),
    ],
)
def test_what_cannot_run_is_refused_before_a_process_starts(arguments, keywords, named, monkeypatch):
    monkeypatch.setattr(module, "new_process", None)  # whoever gets here raises TypeError
    with pytest.raises(SpecError, match=named):
        launch(*arguments, **keywords)


def test_a_function_of_a_notebook_is_refused(monkeypatch):
    def of_a_cell():
        return 1

    of_a_cell.__module__, of_a_cell.__qualname__ = "__main__", "of_a_cell"
    monkeypatch.setattr(module, "new_process", None)
    monkeypatch.setattr(sys.modules["__main__"], "of_a_cell", of_a_cell, raising=False)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(SpecError, match="put it in a file"):
        launch(of_a_cell, 2)


def test_ranks_do_not_launch_ranks(monkeypatch):
    monkeypatch.setattr(module, "new_process", None)
    monkeypatch.setenv("RANK", "3")
    for world in ("4", "four"):
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(SpecError, match=f"already rank 3 of {world}"):
            launch(sum_of_ranks, 2, 1)
