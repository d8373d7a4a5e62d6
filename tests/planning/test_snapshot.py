"""`llmlab fix SNAPSHOT.pickle`: holes, failures, and two snapshots compared."""

import json
import pickle

import pytest
from click.testing import CliRunner

import llmlab as lab
from llmlab.cli.main import cli

MiB = 2**20
FORWARD = {"filename": "model.py", "line": 3, "name": "forward"}


def _segment(address, *blocks):
    """Return a segment of `blocks`, (size in MiB, whether it is in use)."""
    described = [
        {"size": size * MiB, "requested_size": size * MiB - 100, "frames": [FORWARD] if used else [],
         "state": "active_allocated" if used else "inactive"} for size, used in blocks
    ]  # fmt: skip
    total = sum(size for size, _ in blocks) * MiB
    return {"device": 0, "address": address, "total_size": total, "stream": 0, "blocks": described}


@pytest.fixture
def write(tmp_path):
    def written(name, segments, trace=()):
        path = tmp_path / name
        path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [list(trace)]}))
        return path

    return written


SEGMENTS = [_segment(0x1000000, (6, True), (10, False), (4, True)), _segment(0x8000000, (20, False))]


def test_holes_are_free_bytes_that_only_their_segment_can_use(write):
    report = lab.fix(write("a.pickle", SEGMENTS))
    assert (report.allocated, report.reserved) == (10 * MiB, 40 * MiB)
    assert list(report.holes.values()) == [10 * MiB]
    assert (report.unused_segments, report.largest_free, report.rounding) == (20 * MiB, 20 * MiB, 200)
    assert report.parts == {"activations": 10 * MiB}


def test_a_failure_that_all_free_memory_together_could_serve_is_fragmentation(write):
    oom = {"action": "oom", "size": 25 * MiB, "device_free": 0, "stream": 0, "frames": [FORWARD]}
    failure = lab.fix(write("a.pickle", SEGMENTS, [oom])).failure
    assert (failure.allocated, failure.unallocated, failure.short) == (10 * MiB, 30 * MiB, 0)
    larger = lab.fix(write("b.pickle", SEGMENTS, [{**oom, "size": 37 * MiB}])).failure
    assert larger.short == 7 * MiB


def test_memory_at_a_failure_is_that_before_what_was_freed_later(write):
    address = SEGMENTS[0]["address"] + 6 * MiB  # of a block that the file has as free
    trace = [
        {"action": "oom", "size": 90 * MiB, "device_free": MiB, "stream": 0, "frames": [FORWARD]},
        {"action": "free_completed", "addr": address, "size": 10 * MiB, "stream": 0, "frames": []},
        {"action": "segment_free", "addr": 0x20000000, "size": 50 * MiB, "stream": 0, "frames": []},
    ]
    failure = lab.fix(write("a.pickle", SEGMENTS, trace)).failure
    assert (failure.allocated, failure.unallocated) == (20 * MiB, 70 * MiB)


def test_two_snapshots_are_compared_place_by_place(write):
    first = write("rank0.pickle", SEGMENTS)
    second = write("rank1.pickle", [*SEGMENTS, _segment(0x9000000, (32, True))])
    report = lab.fix(second, against=first)
    assert report.peak - report.other.peak == 32 * MiB
    shown = CliRunner().invoke(cli, ["fix", str(second), str(first)])
    assert shown.exit_code == 0
    assert "+32.00 MiB" in next(line for line in shown.output.splitlines() if "in model.py:3 forward" in line)


def test_the_gpu_with_the_most_memory_is_shown(write):
    small = {**_segment(0x1000000, (1, True)), "device": 1}
    report = lab.fix(write("a.pickle", [small, *SEGMENTS]))
    assert (report.device, report.devices, report.reserved) == (0, (0, 1), 40 * MiB)


def test_the_changes_of_a_run_come_with_the_snapshot(write):
    words = ["fix", str(write("a.pickle", SEGMENTS)), "gpt2", "--gpu", "T4", "--json"]
    answer = json.loads(CliRunner().invoke(cli, words).stdout)
    assert answer["snapshot"]["peak"] == 10 * MiB
    assert answer["changes"]["levers"]


def test_a_hostile_file_is_one_line_and_exit_code_2(tmp_path):
    path = tmp_path / "a.pickle"
    path.write_bytes(b"cposix\nsystem\n(S'exit 3'\ntR.")  # protocol 0
    shown = CliRunner().invoke(cli, ["fix", str(path)])
    assert shown.exit_code == 2 and shown.stderr.count("\n") == 1 and "posix.system" in shown.stderr
    assert CliRunner().invoke(cli, ["fix", str(tmp_path / "missing.pickle")]).exit_code == 2


def _nested(depth):
    """Return a list whose text has 2**depth elements, of a few bytes in a file."""
    found = [0]
    for _ in range(depth):
        found = [found, found]
    return found


@pytest.mark.parametrize("changed", [
    {"size": 10**400}, {"size": _nested(60)}, {"action": ["alloc"]}, {"frames": 7}, {"frames": [7]},
    {"frames": [{"filename": _nested(60), "name": "forward", "line": 3}]}, {"history": {"frames": []}, "frames": []},
])  # fmt: skip
def test_a_file_with_anything_in_place_of_a_size_or_a_stack_is_refused(write, changed):
    entry = {"action": "alloc", "addr": 0x1000000, "size": MiB, "stream": 0, "frames": []}
    path = write("a.pickle", SEGMENTS, [{**entry, **changed}])
    with pytest.raises(lab.SpecError, match="no memory snapshot of torch"):
        lab.fix(path)


def test_the_names_in_a_file_cannot_write_to_the_terminal(write):
    frame = {"filename": "/home/\x1b[31mtrain.py", "name": "forward\n\x1b]0;title\x07", "line": 3}
    entry = {"action": "alloc", "addr": 0x9000000, "size": 99 * MiB, "stream": 0, "frames": [frame]}
    shown = CliRunner().invoke(cli, ["fix", str(write("a.pickle", SEGMENTS, [entry]))]).output
    assert "train.py:3 forward" in shown and "\x1b" not in shown and "\x07" not in shown
