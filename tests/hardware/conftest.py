import pytest
import torch

from llmlab.hardware.gpu import gpu
from llmlab.hardware.this_machine import Host


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    monkeypatch.delenv("LLMLAB_AS", raising=False)
    monkeypatch.delenv("LLMLAB_SCALE", raising=False)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def cuda_host():
    def of(card_name: str, **changed) -> Host:
        card = gpu(card_name)
        facts = {"device": "cuda", "name": card_name, "gpu": card, "memory": card.memory, "cpu": "a CPU", "cores": 2,
                 "python": "3.11.7", "versions": {"torch": "2.13.0"}, "driver": "570.1",
                 "compute_capability": card.compute_capability}  # fmt: skip
        return Host(**{**facts, **changed})

    return of
