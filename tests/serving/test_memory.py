"""What weights take on each GPU of a deployment."""

import pytest

import llmlab as lab
from llmlab.serving.memory import weight_bytes


def test_expert_parallelism_divides_routed_experts_and_leaves_the_shared_one_whole():
    """DeepSeek-V3: 58 layers, each with one shared expert of 2,048 channels, which every token passes."""
    spec = lab.model("deepseek-ai/DeepSeek-V3")
    tensors, experts = (weight_bytes(spec, lab.Service(tp=8, ep=ep), lab.gpu("H100")) for ep in (1, 8))
    assert experts - tensors == 58 * 3 * 7168 * 2048 * 2 * 7 // 8


def test_kernels_in_mxfp4_pad_experts_except_on_hopper():
    """gpt-oss-20b's experts are 2,880 channels wide: vLLM 0.19 logged 13.72 GiB on an A100, the file has 12.82."""
    spec, service = lab.model("openai/gpt-oss-20b"), lab.Service(weights="mxfp4")
    hopper, ampere = (weight_bytes(spec, service, lab.gpu(name)) / 2**30 for name in ("H100", "A100-80GB"))
    assert hopper == pytest.approx(12.82, rel=0.005)
    assert ampere == pytest.approx(13.72, rel=0.005)
