"""Memory snapshots: nothing in a file is run, and the stacks say phases and parts as the simulator knows them."""

import os
import pickle
import subprocess
import sys

import pytest

from llmlab import SpecError
from llmlab.recording.parts import Event
from llmlab.recording.snapshot import events_of_trace, growth, read_snapshot

LINEAR = {"filename": "/site-packages/torch/nn/modules/linear.py", "line": 1, "name": "forward"}
CALL = {"filename": "/site-packages/torch/nn/modules/module.py", "line": 1, "name": "_call_impl"}
MOVE = {"filename": "/site-packages/torch/nn/modules/module.py", "line": 1, "name": "_apply"}
ADAM = {"filename": "/site-packages/torch/optim/adam.py", "line": 1, "name": "_init_group"}
RECOMPUTE = {"filename": "/site-packages/torch/utils/checkpoint.py", "line": 1, "name": "unpack_hook"}
CLOSURE = {"filename": "train.py", "line": 5, "name": "closure"}
SCRIPT = {"filename": "train.py", "line": 7, "name": "<module>"}
MiB = 2**20


class _Trace:
    """A recording of a GPU, on which backward runs in a thread without Python."""

    def __init__(self):
        self.entries, self.live, self.next = [], {}, 2**40

    def alloc(self, size, *frames):
        self.next += size
        self.live[self.next] = (size, list(frames))
        self.entries.append({"action": "alloc", "addr": self.next, "size": size, "stream": 0, "frames": list(frames)})
        return self.next

    def free(self, address):
        size, _ = self.live.pop(address)
        for action in ("free_requested", "free_completed"):
            self.entries.append({"action": action, "addr": address, "size": size, "stream": 0, "frames": []})

    def write(self, path, events=None):
        blocks = [
            {"size": size, "requested_size": size, "state": "active_allocated", "address": address, "frames": frames}
            for address, (size, frames) in self.live.items()
        ]
        segments = [{"device": 0, "address": block["address"], "total_size": block["size"], "stream": 0,
                     "blocks": [block]} for block in blocks]  # fmt: skip
        trace = self.entries if events is None else self.entries[len(self.entries) - events :]
        path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [trace]}))
        return read_snapshot(path)


def _steps(count, kept=0):
    """Return the trace of a training loop in which each step leaves `kept` bytes behind."""
    trace = _Trace()
    trace.alloc(8 * MiB, MOVE, SCRIPT)
    for step in range(count):
        activation = trace.alloc(4 * MiB, LINEAR, CALL, SCRIPT)
        if kept:
            trace.alloc(kept, LINEAR, CALL, SCRIPT)
        trace.free(trace.alloc(MiB, LINEAR, CALL, SCRIPT))
        gradient = trace.alloc(2 * MiB)
        trace.free(activation)
        if step == 0:
            trace.alloc(16 * MiB, ADAM, SCRIPT)
        trace.free(trace.alloc(3 * MiB, ADAM, SCRIPT))
        trace.free(gradient)
    return trace


def test_parts_follow_from_stacks_and_from_what_a_phase_leaves(tmp_path):
    division = _steps(3).write(tmp_path / "a.pickle").history.division
    assert division.parts == {"weights": 8 * MiB, "gradients": 2 * MiB, "optimizer": 16 * MiB, "activations": 4 * MiB}
    assert (division.peak, division.phase) == (30 * MiB, "backward")
    assert division.phases["optimizer"] == 29 * MiB


def test_blocks_older_than_the_recording_count_and_have_the_part_of_their_stack(tmp_path):
    whole = _steps(3).write(tmp_path / "a.pickle").history.division
    late = _steps(3).write(tmp_path / "b.pickle", events=12).history.division  # the last step alone
    assert (late.peak, late.parts) == (whole.peak, whole.parts)


def test_what_is_computed_again_in_backward_is_activations(tmp_path):
    trace = _Trace()
    trace.alloc(MiB, LINEAR, CALL, SCRIPT)
    again = trace.alloc(4 * MiB, LINEAR, CALL, RECOMPUTE)
    trace.alloc(2 * MiB)
    trace.free(again)
    division = trace.write(tmp_path / "a.pickle").history.division
    assert division.parts == {"activations": 5 * MiB, "gradients": 2 * MiB}
    assert division.phases == {"load": 0, "forward": MiB, "backward": 7 * MiB}


def test_a_forward_pass_in_an_optimizers_closure_is_one(tmp_path):
    trace = _Trace()
    trace.alloc(4 * MiB, LINEAR, CALL, CLOSURE, ADAM, SCRIPT)
    assert trace.write(tmp_path / "a.pickle").history.division.parts == {"activations": 4 * MiB}


def test_growth_is_what_a_step_leaves_and_the_next_one_does_not_free(tmp_path):
    assert _steps(4).write(tmp_path / "a.pickle").history.growth() == {}
    grown = _steps(4, kept=MiB).write(tmp_path / "b.pickle").history.growth()
    assert grown == {"train.py:7 <module>": MiB}


def test_a_batch_that_waits_for_the_next_step_is_no_growth():
    events = [Event(1, 0xA, 10), Event(3, 0xB, 20), Event(4, 0xA, -10), Event(6, 0xC, 30), Event(7, 0xB, -20)]
    assert growth(events, [2, 5, 8], lambda time: "batch") == {}


class _Hostile:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['HOSTILE']}",)


@pytest.mark.parametrize("content", [
    {"segments": [], "device_traces": [[]], "extra": _Hostile()}, _Hostile(), {"segments": [], "type": os.PathLike},
])  # fmt: skip
def test_a_pickle_that_asks_for_code_is_refused_and_runs_nothing(tmp_path, monkeypatch, content):
    monkeypatch.setenv("HOSTILE", str(tmp_path / "touched"))
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(SpecError, match=r"asks for (posix|nt|os)\."):
        read_snapshot(path)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("content", [
    pickle.dumps({"a": 1}), pickle.dumps(7), b"", b"\x80\x04}", b"\x80\x04\x8c\xff", b"\x80\x04P0\n.",
    pickle.dumps({"segments": [{"address": 1, "total_size": -1, "blocks": []}]}),
    pickle.dumps({"segments": [{"address": 1, "total_size": 1, "blocks": [{"size": 1, "state": b"inactive"}]}]}),
    pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": "1", "frames": []}]]}),
    pickle.dumps({"segments": [{"address": 1, "total_size": 2**20, "blocks": [
        {"size": 2**20, "state": "active_allocated", "frames": [{"filename": 3}]}]}]}),
])  # fmt: skip
def test_what_is_no_snapshot_is_refused(tmp_path, content):
    path = tmp_path / "a.pickle"
    path.write_bytes(content)
    with pytest.raises(SpecError):
        read_snapshot(path).history.division  # noqa: B018


# ---- against what the simulator knows


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Two steps of a small Llama: the simulator's own parts, and the snapshot with stacks as a GPU records them."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import llmlab as lab

    config = transformers.LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
                                      num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    path = tmp_path_factory.mktemp("snapshot") / "a.pickle"
    with lab.simulator("A100-40GB") as sim:
        model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            ids = torch.randint(0, 8192, (4, 512), device="cuda")
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        timeline = sim.timeline
        sim.save_snapshot(path)
    content = pickle.loads(path.read_bytes())
    entries = [*content["device_traces"][0], *(block for each in content["segments"] for block in each["blocks"])]
    for entry in entries:
        stack = [frame for frame in entry["frames"] if frame["line"]]  # without the simulator's own
        names = [frame["name"] for frame in stack]
        engine = "_engine_run_backward"  # on a GPU what it runs is in a thread of its own
        entry["frames"] = stack[: names.index(engine)] if engine in names else stack
    path.write_bytes(pickle.dumps(content))
    return timeline, path


def test_the_parts_of_a_step_are_those_that_the_simulator_knows(simulated):
    timeline, path = simulated
    division = read_snapshot(path).history.division
    parts: dict[str, int] = {}
    for sizes in timeline.modules.values():
        for part, size in sizes.items():
            parts[part] = parts.get(part, 0) + size
    assert division.peak == pytest.approx(timeline.peak, rel=0.01)
    assert division.phase == timeline.phase
    for part in ("weights", "optimizer", "activations", "logits"):
        assert division.parts[part] == pytest.approx(parts[part], rel=0.01), part


def test_a_snapshot_is_read_without_torch(simulated):
    code = "import sys, llmlab; llmlab.fix(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(simulated[1])], check=True)


def test_a_traces_times_are_microseconds_and_a_free_counts_when_it_completed():
    entries = [{"action": action, "time_us": time, "addr": 9, "size": 100}
               for time, action in enumerate(("alloc", "free_requested", "free_completed"), 5)]  # fmt: skip
    assert events_of_trace(entries) == [Event(5000, 9, 512), Event(7000, 9, -512)]
