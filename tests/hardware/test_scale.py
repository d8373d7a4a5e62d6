"""The sizes chosen for this machine."""

import pytest

from llmlab.base.errors import NotAvailable, SpecError
from llmlab.base.units import GiB
from llmlab.hardware.gpu import gpu
from llmlab.hardware.scale import BIG_FROM, SIZES, T4_FROM, choose, scale
from llmlab.specs.run import Training


@pytest.mark.parametrize(
    ("name", "chosen", "precision"),
    [("T4", "t4", "autocast-fp16"), ("V100-16GB", "t4", "autocast-fp16"), ("V100-32GB", "big", "autocast-fp16"),
     ("RTX-3060", "t4", "autocast-bf16"), ("L4", "big", "autocast-bf16"), ("A10G", "big", "autocast-bf16"),
     ("RTX-4090", "big", "autocast-bf16"), ("A100-40GB", "big", "autocast-bf16"), ("H200", "big", "autocast-bf16")],
)  # fmt: skip
def test_sizes_follow_the_memory_and_precision_the_capability(name, chosen, precision, cuda_host):
    picked = choose(cuda_host(name))
    assert (picked.name, picked.precision, picked.device) == (chosen, precision, "cuda")
    assert name in picked.reason


def test_a_small_gpu_runs_the_cpu_s_sizes_on_the_gpu(cuda_host):
    picked = choose(cuda_host("RTX-3060", name="a laptop's", gpu=None, memory=6 * GiB))
    assert (picked.name, picked.device, picked.seq_len) == ("cpu", "cuda", SIZES["cpu"][2])


def test_a_cpu_computes_in_fp32_and_says_why(no_gpu):
    picked = scale()
    assert (picked.name, picked.device, picked.precision) == ("cpu", "cpu", "fp32")
    assert str(picked).startswith("scale cpu: gpt2, micro_batch 1, seq_len 128, fp32, 3 steps on cpu, because torch ")


def test_the_override_wins_on_a_gpu(cuda_host):
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
def test_every_scale_is_a_run_that_can_be_asked_for(name, cuda_host):
    here = cuda_host("H200")
    picked = choose(here, name)
    run = Training(micro_batch=picked.micro_batch, seq_len=picked.seq_len, precision=picked.precision)
    assert run.seq_len <= 1024, "GPT-2 has 1024 positions"


def test_what_is_chosen_for_a_card_fits_it(cuda_host):
    from llmlab import estimate

    for name in ("RTX-3060", "T4", "L4", "A10G", "RTX-3090", "V100-32GB"):
        picked = choose(cuda_host(name))
        run = Training(micro_batch=picked.micro_batch, seq_len=picked.seq_len, precision="fp32", attention="eager")
        assert estimate(picked.model, run, name).peak_allocated < 0.75 * gpu(name).memory


def test_a_gpu_with_just_the_memory_of_a_scale_has_it(cuda_host):
    for memory, name in ((BIG_FROM, "big"), (BIG_FROM - 1, "t4"), (T4_FROM, "t4"), (T4_FROM - 1, "cpu"), (None, "cpu")):
        assert choose(cuda_host("T4", memory=memory)).name == name
