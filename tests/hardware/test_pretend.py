"""LLMLAB_AS: the arithmetic of the cap, and what is refused. A GPU is needed for the cap itself: here
torch.cuda is replaced."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmlab.base.errors import NotAvailable, UnknownName
from llmlab.base.units import MiB
from llmlab.hardware import pretend
from llmlab.hardware.gpu import gpu, gpus
from llmlab.hardware.this_machine import host

H200 = gpu("H200")
T4 = gpu("T4")


@pytest.fixture
def on_h200(monkeypatch):
    """An H200 as torch would show it, and what torch was told."""
    told = []
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=H200.memory, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", told.append)
    monkeypatch.delenv("LLMLAB_AS", raising=False)
    return told


def test_the_cap_is_what_a_t4_leaves_beside_its_context():
    assert pretend.cap(T4, H200.memory, (9, 0)) == 14912 * MiB - int(140.875 * MiB)


@given(st.sampled_from(gpus()), st.integers(0, 2**38))
def test_the_fraction_gives_torch_the_cap_back_to_the_byte(card, more):
    """torch multiplies: maximum = (size_t)(fraction · total). Doubles are fine enough for that on any GPU."""
    total = card.memory + more
    allowed = pretend.cap(card, total, (12, 0))
    assert abs(int(allowed / total * total) - allowed) <= 1
    assert 0 < allowed / total <= 1


def test_unset_and_empty_pretend_nothing(monkeypatch, on_h200):
    for value in (None, "", "  "):
        if value is not None:
            monkeypatch.setenv("LLMLAB_AS", value)
        assert pretend.pretended() is None
        assert pretend.apply() is None
        assert pretend.sdpa_backends() is None
    assert on_h200 == []
    assert host().gpu is H200


def test_apply_caps_the_allocator(monkeypatch, on_h200):
    monkeypatch.setenv("LLMLAB_AS", "t4")
    assert pretend.apply() is T4
    assert int(on_h200[0] * H200.memory) == pytest.approx(T4.memory - T4.context, abs=1)


def test_the_pretended_host_hides_what_a_t4_lacks(monkeypatch, on_h200):
    assert host().supports_bf16
    monkeypatch.setenv("LLMLAB_AS", "Tesla T4")
    here = host()
    assert (here.gpu, here.memory, here.compute_capability) == (T4, T4.memory, (7, 5))
    assert here.name == "T4 (pretended on NVIDIA H200)"
    assert not here.supports_bf16
    assert not here.supports_flash_attention_2


def test_attention_on_a_pretended_t4_is_memory_efficient_or_math(monkeypatch):
    from torch.nn.attention import SDPBackend

    monkeypatch.setenv("LLMLAB_AS", "t4")
    assert set(pretend.sdpa_backends()) == {SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH}
    monkeypatch.setenv("LLMLAB_AS", "A100-40GB")
    assert pretend.sdpa_backends() is None


def test_an_unknown_card_is_refused_by_the_variable_s_name(monkeypatch):
    monkeypatch.setenv("LLMLAB_AS", "T5")
    with pytest.raises(UnknownName, match=r"LLMLAB_AS=T5: unknown GPU 'T5'.*T4"):
        pretend.pretended()


def test_a_small_card_cannot_play_a_large_one(monkeypatch, on_h200):
    monkeypatch.setenv("LLMLAB_AS", "B200")
    for verb in (pretend.apply, host):
        with pytest.raises(NotAvailable, match=r"LLMLAB_AS=B200 has 178.35 GiB, the GPU here 139.80 GiB: .*unset"):
            verb()
    assert on_h200 == []


def test_an_old_card_cannot_play_one_with_bf16():
    with pytest.raises(NotAvailable, match="RTX-3090 has bf16, and the GPU here does not"):
        pretend.cap(gpu("RTX-3090"), gpu("V100-32GB").memory, (7, 0))


def test_without_cuda_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LLMLAB_AS", "t4")
    for verb in (pretend.apply, host):
        with pytest.raises(NotAvailable, match=r"LLMLAB_AS=T4 needs a CUDA GPU.*unset LLMLAB_AS"):
            verb()
