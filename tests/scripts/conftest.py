import pytest

MODEL = """
import os, sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step():
    x = torch.randn(64, 256, device="cuda")
    loss = (model(x) - x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    return loss
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script into the working directory, after the model; return its name."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)

    def write(body, without=""):
        (home / "train.py").write_text(MODEL.replace(without, "# ") + body if without else MODEL + body)
        return "train.py"

    return write
