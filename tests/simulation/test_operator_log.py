"""The log of operators: kinds, bytes and shapes."""

import pytest
import torch

import llmlab as lab
from llmlab import LoRA, Training
from llmlab.formulas.time.flops import flops
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.operators import host_seconds, kernel_seconds


def test_views_start_no_kernel_and_repeats_are_read_once():
    with lab.simulator("A100-80GB") as sim:
        x = torch.zeros(64, 1, device="cuda")
        with sim.operators() as seen:
            y = x.expand(64, 1 << 16).t()
            y + 1.0
    assert [kernel.kind for kernel in seen] == ["none", "none", "strided"]
    assert seen[-1].bytes == 4 * (64 + 64 * (1 << 16))


def test_a_fused_kernel_reads_and_writes_each_tensor_once():
    with lab.simulator("A100-80GB") as sim:
        x, y = (torch.randn(1 << 20, device="cuda") for _ in range(2))
        fused = torch.compile(lambda x, y: torch.relu(x * y + 1).sin())
        fused(x, y)
        with sim.operators() as seen:
            fused(x, y)
        assert sim.counts_all_kernels
    (kernel,) = [each for each in seen if each.kind == "memory"]
    assert kernel.name.startswith("triton_poi_fused") and kernel.bytes == 3 * 4 * (1 << 20)
    rates = kernels("A100-80GB").operators
    assert 0 < host_seconds(kernel, rates) < host_seconds(kernel._replace(compiled=False), rates)
    assert kernel_seconds(kernel, rates) > 0 == host_seconds(kernel._replace(kind="none"), rates)


def test_rows_that_are_not_whole_16_bytes_take_as_long_as_is_estimated():
    """A head of 50,257 words, on an A100: three times what a trace says, which knows no rows."""
    run = Training(micro_batch=4, seq_len=512, precision="bf16")
    small = {"model_type": "gpt2", "n_embd": 256, "n_layer": 1, "n_head": 4, "n_positions": 512}
    for words, times in ((50257, 3), (50256, 1)):
        config = {**small, "vocab_size": words}
        simulated, estimated = lab.simulate(config, run, "A100"), lab.estimate(config, run, "A100")
        assert simulated.time["products"] == pytest.approx(estimated.time["products"], rel=0.05)
        assert ("which take 3 times as long" in simulated.time_sources["products"]) == (times == 3)


def test_adapters_on_the_simulated_card_count_as_the_formulas_do():
    config = {**lab.model("TinyLlama-1.1B").config, "num_hidden_layers": 2}
    run = Training(
        micro_batch=1, seq_len=128, precision="fp16", checkpointing="full", quantization="nf4",
        lora=LoRA(rank=8, targets=("q_proj", "down_proj")),
    )  # fmt: skip
    for gpu in ("T4", "A100-80GB"):
        assert lab.simulate(config, run, gpu).flops == flops(lab.model(config), run, lab.gpu(gpu)).total
