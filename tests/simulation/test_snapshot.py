"""Memory snapshots that the simulator writes."""

import pickle

import pytest
import torch
from torch import nn

from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_snapshot_is_what_memory_viz_reads(tmp_path):
    path = tmp_path / "run.pickle"
    with simulator("T4") as sim:
        model = nn.Linear(1000, 1000).cuda()
        model(torch.ones(8, 1000, device="cuda")).sum().backward()
        sim.save_snapshot(path)
        torch.cuda.memory._dump_snapshot(str(tmp_path / "torch.pickle"))
    content = pickle.loads(path.read_bytes())
    assert content == pickle.loads((tmp_path / "torch.pickle").read_bytes())
    assert set(content) >= {"segments", "device_traces", "allocator_settings", "external_annotations"}
    assert sum(segment["allocated_size"] for segment in content["segments"]) == sim.allocated
    live = 0
    for entry in content["device_traces"][0]:
        live += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
    assert live == sum(segment["requested_size"] for segment in content["segments"])
    from torch.cuda import _memory_viz

    assert "cudaMalloc(" in _memory_viz.trace(content) and "Mi" in _memory_viz.segsum(content)
    blocks = [block for segment in content["segments"] for block in segment["blocks"]]
    stacks = [block["frames"] for block in blocks if block["state"] == "active_allocated"]
    assert all(any(frame["filename"] == __file__ for frame in stack) for stack in stacks)
    assert list(tmp_path.glob("*.tmp")) == []
