"""What this machine has."""

import os
import platform
import re
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

from llmlab.base.units import GiB
from llmlab.hardware import this_machine as host_module
from llmlab.hardware.scale import choose
from llmlab.hardware.this_machine import environment, host

HERE = Path(__file__).resolve().parents[2]


def test_a_cpu_has_ram_cores_and_versions_but_no_card(no_gpu):
    here = host()
    assert (here.device, here.gpu, here.driver, here.compute_capability) == ("cpu", None, None, None)
    assert 0 < here.memory <= psutil.virtual_memory().total
    assert here.cores == len(psutil.Process().cpu_affinity())
    assert here.python == platform.python_version()
    assert here.versions["torch"] == version("torch")
    assert not here.supports_bf16
    assert not here.supports_flash_attention_2


def test_bf16_is_asked_of_the_capability_because_torch_counts_emulation(monkeypatch, cuda_host):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)  # what torch says on a T4
    assert not cuda_host("T4").supports_bf16
    assert not cuda_host("V100-32GB").supports_bf16
    assert cuda_host("A10G").supports_bf16
    assert cuda_host("H200").supports_flash_attention_2


def test_without_torch_the_host_is_a_cpu_that_says_so(monkeypatch):
    monkeypatch.setattr(host_module, "installed", {"transformers": "5.0.0"}.get)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    here = host()
    assert here.device == "cpu"
    assert "torch not installed" in str(here)
    assert "pip install torch" in choose(here).reason


def test_a_containers_limit_is_the_memory_there_is(monkeypatch):
    read, exists = Path.read_text, Path.exists
    limit = "/sys/fs/cgroup/memory.max"
    monkeypatch.setattr(Path, "exists", lambda p, **kw: str(p) == limit or exists(p, **kw))
    monkeypatch.setattr(Path, "read_text", lambda p, *a, **kw: "1073741824\n" if str(p) == limit else read(p, *a, **kw))
    assert host_module._ram() == GiB
    monkeypatch.setattr(Path, "read_text", lambda p, *a, **kw: "max\n" if str(p) == limit else read(p, *a, **kw))
    assert host_module._ram() > GiB


def test_environment_is_text_with_date_commit_and_versions(no_gpu):
    facts = environment()
    assert all(isinstance(key, str) and isinstance(value, str) and value for key, value in facts.items())
    assert {"device", "python", "torch", "llmlab", "date"} <= set(facts)
    assert abs((date.fromisoformat(facts["date"]) - date.today()).days) <= 1
    if (HERE / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|\d+\.\d+\.\d+", facts["llmlab"])


def test_a_missing_tool_is_no_error(monkeypatch):
    monkeypatch.setitem(os.environ, "PATH", "")
    assert host_module._output("nvidia-smi", "--version") == ""
