"""The snapshot that memory_viz reads."""

from __future__ import annotations

import pickle
from io import StringIO

import pytest
import torch
from torch import nn

import llmlab as lab

if torch.cuda.is_available():
    pytest.skip("the simulated device must not be mistaken for a real one", allow_module_level=True)

D, B, V = 512, 1024, 32768


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


@pytest.fixture(scope="module")
def sim():
    with lab.simulator("A100-40GB") as sim:
        net = Net().cuda()
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            target = torch.zeros(B, dtype=torch.long, device="cuda")
            nn.functional.cross_entropy(net(torch.randn(B, D, device="cuda")), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    return sim


@pytest.fixture(scope="module")
def snapshot(sim, tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshot") / "run.pickle"
    sim.save_snapshot(path)
    with open(path, "rb") as file:
        return pickle.load(file)


def test_memory_viz_reads_the_snapshot(sim, snapshot):
    from torch.cuda import _memory_viz

    assert "Summary of segments" in _memory_viz.segsum(snapshot)
    assert "alloc" in _memory_viz.trace(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot) and _memory_viz.segment_plot(snapshot)
    flames = StringIO()
    for segment in snapshot["segments"]:
        _memory_viz._write_blocks(flames, "stream", segment["blocks"])
    lines = [line.rsplit(" ", 1) for line in flames.getvalue().splitlines()]
    held = sum(int(size) for frames, size in lines if "active_allocated" in frames)
    assert 0.95 * sim.allocated < held <= sim.allocated  # asked for; the allocator counts whole blocks
    assert any("layers.0:0:" in frames or "layers.0.up:0:" in frames or "aten." in frames for frames, _ in lines)


def test_the_snapshot_names_module_and_operator(snapshot):
    made = [entry["frames"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    inner = {(frames[0]["filename"], frames[0]["name"]) for frames in made}
    assert ("layers.0.up", "aten.mm.default") in inner
    assert ("lm_head", "aten.mm.default") in inner


def test_a_replayed_trace_ends_at_what_is_allocated(sim, snapshot):
    live = {}
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            del live[entry["addr"]]
    assert len(live) == sum(b["state"] == "active_allocated" for s in snapshot["segments"] for b in s["blocks"])
