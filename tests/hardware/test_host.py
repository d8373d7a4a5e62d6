"""What this machine has, the sizes chosen for it, and the doctor's table."""

import json
import os
import platform
import re
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import torch

from llmlab.base.errors import NotAvailable, SpecError
from llmlab.base.units import GiB
from llmlab.hardware import this_machine as host_module
from llmlab.hardware.doctor import Doctor, chapter, doctor
from llmlab.hardware.gpu import gpu
from llmlab.hardware.scale import SIZES, choose, scale
from llmlab.hardware.this_machine import Host, environment, host
from llmlab.specs.run import Training

HERE = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    monkeypatch.delenv("LLMLAB_AS", raising=False)
    monkeypatch.delenv("LLMLAB_SCALE", raising=False)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def cuda_host(card_name: str, **changed) -> Host:
    card = gpu(card_name)
    facts = {"device": "cuda", "name": card_name, "gpu": card, "memory": card.memory, "cpu": "a CPU", "cores": 2,
             "python": "3.11.7", "versions": {"torch": "2.13.0"}, "driver": "570.1",
             "compute_capability": card.compute_capability}  # fmt: skip
    return Host(**{**facts, **changed})


# ---- host


def test_a_cpu_has_ram_cores_and_versions_but_no_card(no_gpu):
    here = host()
    assert (here.device, here.gpu, here.driver, here.compute_capability) == ("cpu", None, None, None)
    assert 0 < here.memory <= psutil.virtual_memory().total
    assert here.cores == len(psutil.Process().cpu_affinity())
    assert here.python == platform.python_version()
    assert here.versions["torch"] == version("torch")
    assert not here.supports_bf16
    assert not here.supports_flash_attention_2


def test_bf16_is_asked_of_the_capability_because_torch_counts_emulation(monkeypatch):
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


# ---- scale


@pytest.mark.parametrize(
    ("name", "chosen", "precision"),
    [("T4", "t4", "autocast-fp16"), ("V100-16GB", "t4", "autocast-fp16"), ("V100-32GB", "big", "autocast-fp16"),
     ("RTX-3060", "t4", "autocast-bf16"), ("L4", "big", "autocast-bf16"), ("A10G", "big", "autocast-bf16"),
     ("RTX-4090", "big", "autocast-bf16"), ("A100-40GB", "big", "autocast-bf16"), ("H200", "big", "autocast-bf16")],
)  # fmt: skip
def test_sizes_follow_the_memory_and_precision_the_capability(name, chosen, precision):
    picked = choose(cuda_host(name))
    assert (picked.name, picked.precision, picked.device) == (chosen, precision, "cuda")
    assert name in picked.reason


def test_a_small_gpu_runs_the_cpu_s_sizes_on_the_gpu():
    picked = choose(cuda_host("RTX-3060", name="a laptop's", gpu=None, memory=6 * GiB))
    assert (picked.name, picked.device, picked.seq_len) == ("cpu", "cuda", SIZES["cpu"][2])


def test_a_cpu_computes_in_fp32_and_says_why(no_gpu):
    picked = scale()
    assert (picked.name, picked.device, picked.precision) == ("cpu", "cpu", "fp32")
    assert str(picked).startswith("scale cpu: gpt2, micro_batch 1, seq_len 128, fp32, 3 steps on cpu, because torch ")


def test_the_override_wins_on_a_gpu():
    here = cuda_host("H200")
    assert choose(here, "T4 ").name == "t4"
    assert choose(here, "cpu").device == "cpu"
    assert "LLMLAB_SCALE=t4 asks for it" in choose(here, "t4").reason
    assert choose(here, "").name == "big"


def test_a_wrong_override_shows_what_is_allowed(monkeypatch, no_gpu):
    monkeypatch.setenv("LLMLAB_SCALE", "huge")
    with pytest.raises(SpecError, match="LLMLAB_SCALE=huge is not one of cpu, t4, big"):
        scale()
    monkeypatch.setenv("LLMLAB_SCALE", "big")
    with pytest.raises(NotAvailable, match="LLMLAB_SCALE=big needs a CUDA GPU"):
        scale()


@pytest.mark.parametrize("name", SIZES)
def test_every_scale_is_a_run_that_can_be_asked_for(name):
    here = cuda_host("H200")
    picked = choose(here, name)
    run = Training(micro_batch=picked.micro_batch, seq_len=picked.seq_len, precision=picked.precision)
    assert run.seq_len <= 1024, "GPT-2 has 1024 positions"


def test_what_is_chosen_for_a_card_fits_it():
    from llmlab import estimate

    for name in ("RTX-3060", "T4", "L4", "A10G", "RTX-3090", "V100-32GB"):
        picked = choose(cuda_host(name))
        run = Training(micro_batch=picked.micro_batch, seq_len=picked.seq_len, precision="fp32", attention="eager")
        assert estimate(picked.model, run, name).peak_allocated < 0.75 * gpu(name).memory


# ---- doctor


def test_the_doctor_names_the_device_the_scale_and_each_chapter(no_gpu):
    checks = doctor()
    text, page = str(checks), checks._repr_html_()
    for part in (checks.host.name, checks.host.versions["torch"], checks.scale.reason, "chapter memory-anatomy"):
        assert part in text
        assert part in page
    assert "runs: at the scale cpu, fp32 on cpu" in text
    assert json.loads(json.dumps(checks.to_dict()))["scale"]["name"] == "cpu"


def test_the_doctor_tells_a_t4_what_it_lacks():
    here = cuda_host("T4")
    text = str(Doctor(here, choose(here), ()))
    assert re.search(r"^bf16 +no: use autocast-fp16$", text, re.M)
    assert re.search(r"^FlashAttention-2 +no", text, re.M)
    assert re.search(r"^in the GPU table +T4$", text, re.M)
    data = json.loads(json.dumps(Doctor(here, choose(here), ()).to_dict()))
    assert (data["host"]["gpu"], data["host"]["supports_bf16"]) == ("T4", False)


def test_a_chapter_that_cannot_run_says_what_it_needs():
    here = choose(cuda_host("T4"))
    needs = {"name": "launch", "packages": ["no-such-package"], "extra": "distributed", "scales": ["big"]}
    lacking = chapter(needs, here)
    assert (lacking.runs, lacking.note) == (False, "needs no-such-package; pip install 'llmlab[plot,distributed]'")
    assert "needs the scale big" in chapter({**needs, "packages": ["torch"]}, here).note
    assert chapter({**needs, "packages": ["torch"], "scales": ["t4", "big"]}, here).runs
