"""What weights take on each GPU of a deployment."""

import llmlab as lab
from llmlab.serving.memory import weight_bytes


def test_expert_parallelism_divides_routed_experts_and_leaves_the_shared_one_whole():
    """DeepSeek-V3: 58 layers, each with one shared expert of 2,048 channels, which every token passes."""
    spec = lab.model("deepseek-ai/DeepSeek-V3")
    tensors, experts = (weight_bytes(spec, lab.Service(tp=8, ep=ep, weights="bf16")) for ep in (1, 8))
    assert experts - tensors == 58 * 3 * 7168 * 2048 * 2 * 7 // 8
