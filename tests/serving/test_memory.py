"""The weights on each GPU of a deployment, its cache, and the requests that fill it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from llmlab.serving.memory import SAMPLING, activation_bytes, cache_bytes, divided_memory, weight_bytes
from llmlab.serving.sizing import longest_context
from llmlab.specs.model import model

LLAMA, LLAMA_1B = model("meta-llama/Llama-3.1-8B"), "meta-llama/Llama-3.2-1B"
H100 = lab.gpu("H100")
FAMILIES = ("meta-llama/Llama-3.1-8B", "openai/gpt-oss-20b", "Qwen/Qwen3-Next-80B-A3B-Instruct",
            "deepseek-ai/DeepSeek-V3", "google/gemma-3-27b-pt")  # fmt: skip


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


@settings(deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(64, 30_000))
def test_the_longest_requests_together_fill_the_cache(name, tokens):
    """vLLM's "Maximum concurrency": N requests of max_model_len tokens fit in the cache, and N + 1 do not. Layers with
    windows are excluded, because vLLM reserves the tokens of a step for them."""
    spec, service = model(name), lab.Service(weights="fp8", tp=8, max_model_len=tokens)
    memory = divided_memory(spec, service, H100)
    if users := int(memory.longest):
        assert longest_context(spec, service, H100, users) >= tokens
    if memory.per_longest == cache_bytes(spec, service, -(-tokens // 16) * 16):
        assert longest_context(spec, service, H100, users + 1) < -(-tokens // 16) * 16


def test_a_cache_of_windows_alone_has_as_many_blocks_as_fit_within_them():
    """Mistral-7B: 2 · 32 layers · 8 heads · 128 · 2 bytes are 128 KiB per token, and vLLM also reserves a step."""
    spec, gpu = model("mistralai/Mistral-7B-v0.1"), lab.gpu("L4")
    service = lab.Service(max_num_batched_tokens=2048)
    memory = divided_memory(spec, service, gpu)
    assert memory.tokens == memory.cache // (16 * 128 * 1024) * 16
    assert memory.longest == pytest.approx(memory.cache / (128 * 1024 * (4096 + 2048 + 16)), rel=0.01)


def test_a_model_whose_longest_request_does_not_fit_needs_a_limit():
    """vLLM refuses to start (check_enough_kv_cache_memory); with the length that the note names it starts."""
    service = lab.Service(tp=2)
    report = lab.serve("meta-llama/Llama-3.1-70B", service, "H100")
    (note,) = [note for note in report.notes if note.code == "max-model-len"]
    length = int(note.rpartition("=")[2])
    for tokens, starts in ((length, True), (length + 16, False)):
        memory = divided_memory(model(report.model), replace(service, max_model_len=tokens), H100)
        assert (memory.longest >= 1) == starts


@pytest.mark.parametrize(("gib", "longest", "draft", "logged"), [
    (3.81, 20_000, None, 1.56), (2.89, 29_000, None, 0.82), (51.63, 131_072, "eagle3", 3.13),
])  # fmt: skip
def test_the_longest_requests_are_as_many_as_vllm_logged(gib, longest, draft, logged):
    """"Maximum concurrency" of Llama-3.1-8B, vllm-project/vllm#10517 and #19996 (with EAGLE's layer)."""
    service = lab.Service(max_model_len=longest, draft=draft, acceptance=0.7 if draft else None)
    memory = replace(divided_memory(LLAMA, service, H100), cache=int(gib * 2**30))
    assert memory.longest == pytest.approx(logged, abs=0.006)


def test_a_draft_takes_memory_for_its_weights_and_cache():
    plain, draft = lab.Service(), model(LLAMA_1B)
    with_draft = replace(plain, draft=LLAMA_1B, acceptance=0.7)
    one, two = divided_memory(LLAMA, plain, H100), divided_memory(LLAMA, with_draft, H100)
    assert two.weights - one.weights == pytest.approx(2 * draft.parameters, rel=0.01)
    assert two.per_token - one.per_token == 4 * draft.layers * draft.kv_heads * draft.head_dim
    deepseek = model("deepseek-ai/DeepSeek-V3")
    mtp = lab.Service(weights="fp8", tp=8, draft="mtp", acceptance=0.85)
    without = replace(mtp, draft=None, acceptance=None)
    added = divided_memory(deepseek, mtp, H100).weights - divided_memory(deepseek, without, H100).weights
    assert 8 * added == pytest.approx(11.5e9 + 8 * 3 * 2 * 7168**2, rel=0.1)  # 11.5B parameters of the layer: README


def test_activations_are_those_of_the_widest_layer_or_of_sampling():
    """8,192 tokens of bf16: the residual, its norm and a copy, and of attention 32 + 2 · 8 heads and 32 of the output,
    or gate, up and their product. With a vocabulary of 256 Ki, 1,024 requests are sampled from more."""
    sizes = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 1024, "num_hidden_layers": 2, "head_dim": 128,
             "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}  # fmt: skip
    narrow, wide = (model({**sizes, "intermediate_size": size}) for size in (512, 8192))
    tokens, service = 8192, lab.Service()
    assert activation_bytes(narrow, service, H100) == 2 * tokens * (1024 + 2 * 1024 + (32 + 16 + 32) * 128)
    assert activation_bytes(wide, service, H100) == 2 * tokens * (1024 + 2 * 1024 + 3 * 8192)
    assert activation_bytes(wide, lab.Service(tp=2), H100) == 2 * tokens * (1024 + 2 * 1024 + 3 * 4096)
    words = model({**sizes, "intermediate_size": 512, "vocab_size": 1 << 18})
    assert activation_bytes(words, service, H100) == 2 * tokens * 1024 + 1024 * (1 << 18) * SAMPLING
