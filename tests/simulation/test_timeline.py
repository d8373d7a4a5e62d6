"""What the simulated GPU held when: categories, modules, the peak's place, snapshots, and out of memory."""

import pickle
from importlib import import_module
from io import StringIO

import pytest
import torch
from torch import nn

import llmlab as lab
from llmlab.recording.parts import collapsed

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


WEIGHTS = 4 * (3 * 2 * 4 * D * D + D * V)  # bytes


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


def test_the_timeline_reaches_the_peak_and_ends_at_what_is_held(sim):
    assert max(sim.timeline) == sim.timeline.peak == sim.peak_allocated
    assert sim.timeline[-1] == sim.allocated
    assert max(sum(parts.values()) for _, parts in sim.timeline.points) == sim.peak_allocated


def test_phases_of_a_script_are_inferred(sim):
    phases = list(dict.fromkeys(phase for phase, _ in sim.timeline.points))
    assert phases == ["load", "forward", "backward", "optimizer"]


def test_categories_are_as_large_as_their_tensors(sim):
    seen = {part: max(parts.get(part, 0) for _, parts in sim.timeline.points) for part in ("weights", "gradients")}
    assert seen["weights"] == pytest.approx(WEIGHTS, rel=0.001)
    assert seen["gradients"] == pytest.approx(WEIGHTS, rel=0.001)
    last = sim.timeline.points[-1][1]
    assert last["optimizer"] == pytest.approx(2 * WEIGHTS, rel=0.03)  # blocks keep rests of their segments
    assert last["workspace"] == 2 * sim.gpu.cublas_workspace
    logits = [parts.get("logits", 0) for phase, parts in sim.timeline.points if phase == "backward"]
    assert max(logits) == pytest.approx(3 * 4 * B * V, rel=0.01)  # log-softmax, its gradient, the logits' gradient


def test_what_backward_needs_is_activations_of_the_layer_that_made_it(sim):
    # A layer's own: relu's output, 4 D wide, and the sum, D wide, which the next module keeps. up's output dies.
    assert sim.timeline.modules["layers.*"]["activations"] == pytest.approx(3 * 4 * B * (4 * D + D), rel=0.05)
    assert "activations" not in sim.timeline.modules["layers.*.up"]


def test_modules_add_up_to_the_peak(sim):
    assert sum(sum(parts.values()) for parts in sim.timeline.modules.values()) == sim.timeline.peak


def test_the_peak_is_made_where_the_loss_goes_backward(sim):
    assert sim.timeline.phase == "backward"
    assert "softmax_backward" in sim.timeline.place.operator


def test_backward_belongs_to_the_module_whose_forward_it_undoes():
    with lab.simulator("T4") as sim:
        net = nn.Sequential(nn.Linear(64, 50_000, bias=False), nn.Linear(50_000, 8, bias=False)).cuda()
        net(torch.randn(8, 64, device="cuda")).sum().backward()
        place = sim.timeline.place
    assert (place.operator, place.module) == ("aten.mm.default", "0")  # the gradient of its weights, the last to come


def test_recomputed_activations_are_activations():
    from torch.utils.checkpoint import checkpoint

    with lab.simulator("T4") as sim:
        layer = Layer().cuda()
        x = torch.randn(B, D, device="cuda", requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    backward = [parts.get("activations", 0) for phase, parts in sim.timeline.points if phase == "backward"]
    assert max(backward) >= 4 * B * 4 * D


def test_the_picture_says_the_peak_and_its_module(sim):
    said = repr(sim.timeline.plot())
    assert "in backward" in said and "_log_softmax_backward_data" in said


def test_no_hook_stays_after_the_block(sim):
    modules, optimizers = import_module("torch.nn.modules.module"), import_module("torch.optim.optimizer")
    assert not modules._global_forward_hooks and not modules._global_forward_pre_hooks
    assert not optimizers._global_optimizer_pre_hooks and not optimizers._global_optimizer_post_hooks


def test_layers_collapse():
    assert collapsed("model.layers.31.mlp.down_proj") == "model.layers.*.mlp"
    assert collapsed("transformer.wte") == "transformer.wte"


# ---- lab.simulate

GPT = {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 256, "vocab_size": 20_000}


def test_a_report_divides_its_peak_by_module():
    report = lab.simulate(GPT, lab.Training(micro_batch=4, seq_len=256), "T4")
    assert sum(sum(parts.values()) for parts in report.modules.values()) == report.peak_allocated
    assert report.modules["transformer.h.*.mlp"]["weights"] >= 3 * 2 * 4 * 128 * 128 * 4
    assert "transformer.h.*.mlp" in report.module_table()
    assert report.peak_at in repr(report.plot_timeline())
    assert lab.Report.from_json(report.to_json()) == report


def test_out_of_memory_says_phase_operator_module_and_how_much():
    report = lab.simulate("gpt2", lab.Training(micro_batch=32, seq_len=1024, attention="eager"), "T4")
    assert report.outcome == "out of memory"
    assert report.where.startswith("forward, bmm in transformer.h.")
    assert report.where.endswith(" MiB")
    assert report.where in str(report)


# ---- snapshots


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


def test_a_module_may_have_an_attribute_called_buffers():
    """Megatron-LM's DistributedDataParallel has: its gradient buffers."""

    class Buffered(nn.Linear):
        buffers = ()

    with lab.simulator("A100-40GB") as sim:
        model = Buffered(D, D, bias=False).cuda()
        model(torch.randn(B, D, device="cuda")).sum().backward()
        assert sim.timeline.points[-1][1]["weights"] == 4 * D * D
