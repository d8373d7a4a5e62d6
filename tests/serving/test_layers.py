"""What an engine runs, read from configs: weights and caches of every kind of layer."""

import pytest

from llmlab.hardware.gpu import gpu
from llmlab.serving.layers import Attention, Experts, LatentAttention, Recurrence, layers_of
from llmlab.serving.memory import cache_bytes, weight_bytes
from llmlab.serving.service import Service
from llmlab.specs.model import model

WHOLE = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3",
         "openai/gpt-oss-120b", "Qwen/Qwen3-Next-80B-A3B-Instruct", "nvidia/Nemotron-H-8B-Base-8K",
         "MiniMaxAI/MiniMax-M2.5", "zai-org/GLM-4.5", "Qwen/Qwen3-Coder-480B-A35B-Instruct")  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_the_layers_weights_are_the_models(name):
    """Norms and biases are left out: 0.1 % at most."""
    spec = model(name)
    assert weight_bytes(spec, Service(), gpu("H100")) == pytest.approx(2 * spec.parameters, rel=1e-3)


def test_kinds_of_layers():
    def kinds(name):
        return {(type(layer.mixer), type(layer.mlp).__name__): count for layer, count in layers_of(model(name)).kinds}

    assert kinds("deepseek-ai/DeepSeek-V3") == {(LatentAttention, "DenseMLP"): 3, (LatentAttention, "Experts"): 58}
    assert kinds("Qwen/Qwen3.5-35B-A3B") == {(Recurrence, "Experts"): 30, (Attention, "Experts"): 10}
    hybrid = {(Recurrence, "NoneType"): 24, (type(None), "DenseMLP"): 24, (Attention, "NoneType"): 4}
    assert kinds("nvidia/Nemotron-H-8B-Base-8K") == hybrid
    windows = {layer.mixer.window: count for layer, count in layers_of(model("google/gemma-3-27b-pt")).kinds}
    assert windows == {1024: 52, None: 10}
    maverick = [layer for layer, _ in layers_of(model("Llama-4-Maverick-17B-128E-Instruct")).kinds]
    assert sum(isinstance(layer.mlp, Experts) for layer in maverick) == 2  # with and without a window


def test_bytes_of_a_cached_token():
    """Llama-3.1-8B: 2 · 32 layers · 8 heads · 128 · 2 bytes. DeepSeek-V3: 61 · (512 + 64) · 2."""

    def of_a_token(name, **fields):
        service = Service(**fields)
        return cache_bytes(model(name), service, 100_001) - cache_bytes(model(name), service, 100_000)

    assert of_a_token("meta-llama/Llama-3.1-8B") == 131_072
    assert of_a_token("meta-llama/Llama-3.1-8B", kv="fp8", tp=4) == 131_072 // 8
    assert of_a_token("meta-llama/Llama-3.1-8B", tp=16) == 131_072 // 8  # 8 heads on 16 GPUs: each is on two
    assert of_a_token("deepseek-ai/DeepSeek-V3") == of_a_token("deepseek-ai/DeepSeek-V3", tp=8) == 70_272
    assert of_a_token("openai/gpt-oss-20b") == 12 * 2 * 8 * 64 * 2  # the other 12 layers have a window of 128
