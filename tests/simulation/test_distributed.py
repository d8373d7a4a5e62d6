"""torch.distributed.checkpoint on a simulated GPU: what is saved can be loaded, and nothing is written."""

import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import llmlab as lab
from llmlab.base.errors import NotAvailable

CARD, RANKS = "A100-40GB", 4


@pytest.fixture
def sim(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(), lab.simulator(CARD, world_size=RANKS) as sim:
        warnings.simplefilter("ignore")
        dist.init_process_group("nccl")
        yield sim


class Trained:
    """A sharded model and its optimizer after a step."""

    def __init__(self, steps=1):
        self.model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for _ in range(steps):
            self.model(torch.empty(4, 256, device="cuda")).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def on_disk():
    """What another process sees."""
    look = "import pathlib; print(*(each for each in pathlib.Path().rglob('*') if each.is_file()), sep='\\n')"
    process = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    return [Path(line) for line in process.stdout.splitlines() if line]


def test_a_checkpoint_loads_and_takes_nothing_of_the_card(sim):
    trained = Trained()
    sim.reset_peak()
    held = sim.allocated
    dcp.save({"app": trained, "step": 3, "ids": torch.arange(4)}, checkpoint_id="saved")
    assert sorted(os.listdir("saved")) == [".metadata", "__0_0.distcp"] and os.path.exists("saved/.metadata")
    assert on_disk() == []
    state = {"app": trained, "step": 0, "ids": torch.zeros(4, dtype=torch.int64)}
    dcp.load(state, checkpoint_id="saved")
    assert (state["step"], state["ids"].tolist()) == (3, [0, 1, 2, 3])
    assert (sim.allocated, sim.peak_allocated) == (held, held)


def test_states_are_made_to_be_loaded_into(sim):
    dcp.save({"app": Trained()}, checkpoint_id="saved")
    fresh = Trained(steps=0)
    assert not fresh.optimizer.state
    gc.collect()  # what was saved goes now, not in the middle of loading
    before = sim.allocated
    dcp.load({"app": fresh}, checkpoint_id="saved")
    # AdamW's two moments, and a step count, of each parameter: weights of 256 x 256 / 4 and biases of 256 / 4 floats.
    moments = 2 * 2 * (256 * 256 // RANKS * 4 + 512)
    assert len(fresh.optimizer.state) == 4 and sim.allocated - before == moments


def test_saving_asynchronously_is_done_at_once(sim):
    trained = Trained()
    assert dcp.async_save({"app": trained}, checkpoint_id="saved").done()
    writer = dcp.FileSystemWriter("other", thread_count=4)
    dcp.save(trained.state_dict(), storage_writer=writer)
    dcp.load(trained.state_dict(), storage_reader=dcp.FileSystemReader("other"))
    assert on_disk() == []


def test_files_beside_it_stay(sim):
    Path("saved").mkdir()
    Path("saved/__0_0.distcp").write_text("a good one")
    dcp.save({"app": Trained()}, checkpoint_id="saved")
    assert on_disk() == [Path("saved/__0_0.distcp")]
    assert Path("saved/__0_0.distcp").read_text() == "a good one"
    os.rename("saved/.metadata", "saved/moved")
    assert sorted(os.listdir("saved")) == ["__0_0.distcp", "moved"]


def test_what_needs_bytes_is_refused(sim):
    with pytest.raises(NotAvailable, match=r"HuggingFaceStorageWriter.*FileSystemWriter .*test_distributed"):
        dcp.HuggingFaceStorageWriter("saved")
