"""Checkpoints on a simulated GPU: they are kept in memory, and loading one takes the GPU's memory."""

import io

import pytest
import torch
from torch import nn

from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_a_checkpoint_is_kept_in_memory_and_takes_the_cards_memory_when_loaded(card, tmp_path):
    path = tmp_path / "best.pt"
    path.write_text("a good checkpoint")
    model = nn.Linear(256, 256, bias=False).cuda()  # 256 KiB
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 256, device="cuda")).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="best.pt is kept in memory"):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    assert path.read_text() == "a good checkpoint"
    before = card.allocated
    content = torch.load(path, map_location="cuda")
    assert content["epoch"] == 3 and content["model"]["weight"].is_cuda
    assert card.allocated - before == 3 * 256 * 1024 + 512  # weight, two moments; step is on the host, 4 B on the GPU
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    before = card.allocated
    on_host = torch.load(path, map_location="cpu", weights_only=True)
    assert not on_host["model"]["weight"].is_cuda and card.allocated == before
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).weight.is_cuda


def test_the_hosts_generator_survives_a_state_that_went_over_the_card(card, tmp_path):
    with pytest.warns(UserWarning, match="is kept in memory"):
        torch.save({"rng": torch.get_rng_state(), "w": torch.ones(3, device="cuda")}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", map_location="cuda")["rng"]
    before = torch.get_rng_state()
    torch.set_rng_state(state.cpu())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    torch.set_rng_state(before)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_real_checkpoint_goes_where_map_location_says(tmp_path):
    path, ties = tmp_path / "real.pt", nn.Linear(256, 256, bias=False)
    torch.save({"a": ties.weight, "b": ties.weight, "ids": torch.arange(3)}, path)
    with simulator("T4") as sim:
        content = torch.load(path, map_location="cuda")
        assert content["a"].is_cuda and sim.allocated == 256 * 1024 + 512  # shared storage, once
        assert content["ids"].tolist() == [0, 1, 2]
        for place in (torch.device("cuda:0"), lambda storage, location: storage.cuda(), {"cpu": "cuda:0"}):
            assert torch.load(path, map_location=place)["b"].is_cuda
        host = torch.load(path)["ids"]
        assert not host.is_cuda and type(host) is torch.Tensor


def test_a_file_of_safetensors_is_read_where_the_script_says(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    library.save_file({"w": torch.ones(256, 256)}, tmp_path / "w.safetensors")
    with simulator("T4") as sim:
        loaded = library.load_file(tmp_path / "w.safetensors", device="cuda")
        assert loaded["w"].is_cuda and sim.allocated == 4 * 256 * 256
