"""Prefill and decode on the roofline: where each is bound, and a published rate derived."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import llmlab as lab
from llmlab.archive import figure
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.roofline import Pass, decode_pass, flip_batch, prefill_pass, weights_read
from llmlab.formulas.time.step import token_seconds

LLAMA, MOE = "meta-llama/Llama-2-7b-hf", "Qwen/Qwen3-30B-A3B"


def test_the_published_bandwidth_of_decoding_is_the_weights_read_and_a_cache_of_208_tokens() -> None:
    """gpt-fast: 104.9 tokens/s at 1397 GB/s; its cache has a multiple of 8 places for 5 + 200 tokens."""
    one = decode_pass(lab.model(LLAMA), lab.Inference(prompt_len=5, new_tokens=200), context=208)
    rate = figure("gpt-fast-decoding")["Llama-2-7B, bf16"]
    assert rate * one.bytes == pytest.approx(figure("gpt-fast-bandwidth").value, rel=1e-3)
    parts = lab.model(LLAMA).parameters_by_component
    assert one.weights == 2 * (lab.model(LLAMA).parameters - parts["embedding"])


def test_the_slower_of_flop_and_bytes_decides_for_the_weights_and_then_for_attention() -> None:
    """Bytes are read while a kernel computes (Williams et al., Roofline, 2009); attention is another kernel."""
    one = Pass(products=60, scores=4, weights=6, cache=8)
    assert one.seconds(rate=1, bandwidth=1) == 60 + 8
    assert one.seconds(rate=20, bandwidth=1) == 6 + 8
    assert one.seconds(rate=1, bandwidth=4) == 60 + 4


@torch.no_grad()
def test_a_passes_flop_are_pytorchs_count_on_the_real_model() -> None:
    shape = {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "max_position_embeddings": 64}  # fmt: skip
    config = AutoConfig.for_model(**shape)
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()  # counted alike everywhere
    spec, run, cache = lab.model(shape), lab.Inference(batch=3, prompt_len=20, new_tokens=9), DynamicCache()
    for one, tokens in ((prefill_pass(spec, run), 20), (decode_pass(spec, run, 21), 1)):
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(3, tokens, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
        assert one.flops == counter.get_total_flops()


def test_decode_flips_where_the_batch_is_the_cards_ridge() -> None:
    """2 FLOP and 2 bytes per weight: a batch of B does B FLOP per byte. 4 bits flip at a quarter, and experts later."""
    spec = lab.model(LLAMA)
    ridge = 312e12 / 2.039e12
    assert flip_batch(spec, lab.Inference(), 312e12, 2.039e12) == pytest.approx(ridge, abs=1)
    narrow = flip_batch(spec, lab.Inference(weights="nf4"), 312e12, 2.039e12)
    assert narrow == pytest.approx(ridge * 4.5 / 16, rel=0.15)
    sparse = flip_batch(lab.model(MOE), lab.Inference(), 312e12, 2.039e12)
    assert 5 * ridge < sparse < 128 / 8 * ridge
    assert flip_batch(spec, lab.Inference(), 1e20, 1.0) is None


def test_the_flip_is_also_the_number_of_prompt_tokens_from_which_prefill_is_bound_by_flop() -> None:
    spec, rate, bandwidth = lab.model(LLAMA), 312e12, 2.039e12
    flip = flip_batch(spec, lab.Inference(), rate, bandwidth)
    for tokens, by_flop in ((flip // 2, False), (2 * flip, True)):
        one = prefill_pass(spec, lab.Inference(prompt_len=tokens))
        assert (one.products / rate > one.weights / bandwidth) == by_flop


def test_attention_is_bound_by_bytes_at_every_batch() -> None:
    """Each kv head's numbers are used by heads / kv_heads queries: FLOP per byte of a bf16 cache."""
    spec = lab.model("meta-llama/Llama-3.1-8B")
    for batch in (1, 64):
        one = decode_pass(spec, lab.Inference(batch=batch), 8192)
        assert one.scores / one.cache == spec.heads / spec.kv_heads


DEEPSEEK = "deepseek-ai/DeepSeek-V3"


def test_latent_attention_decodes_on_the_latents_themselves() -> None:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1: W_UK goes into the query, W_UV into the output, and each of 128 heads
    reads the same 512 + 64 numbers per token: 2 · 128 · (576 + 512) FLOP for 2 · 576 bytes. Nothing is projected up."""
    spec = lab.model(DEEPSEEK)
    for batch, context in ((1, 8192), (64, 1024)):
        one = decode_pass(spec, lab.Inference(batch=batch), context)
        assert one.scores / one.cache == 2 * 128 * (576 + 512) / (2 * 576)  # 241.8
        assert one.products == pytest.approx(2 * batch * (spec.active_parameters - spec.vocab * spec.hidden), rel=0.01)


@torch.no_grad()
def test_absorbed_decoding_gives_the_expanded_result_for_these_flop() -> None:
    """Both ways from scratch, one layer: equal outputs, PyTorch's count of the FLOP of each, and ours."""
    shape = {"model_type": "deepseek_v3", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
             "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24,
             "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
             "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
             "n_shared_experts": 1, "max_position_embeddings": 64}  # fmt: skip
    B, H, S, n, p, r, v = 3, 4, 20, 16, 8, 32, 12
    torch.manual_seed(0)
    q_n, q_p = torch.randn(B, H, 1, n, dtype=torch.float64), torch.randn(B, H, 1, p, dtype=torch.float64)
    c, k_p = torch.randn(B, 1, S, r, dtype=torch.float64), torch.randn(B, 1, S, p, dtype=torch.float64)
    W_k, W_v = torch.randn(H, n, r, dtype=torch.float64), torch.randn(H, r, v, dtype=torch.float64)
    expanded, absorbed = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with expanded:
        k, values = c @ W_k.mT, c @ W_v
        scores = torch.cat((q_n, q_p), -1) @ torch.cat((k, k_p.expand(-1, H, -1, -1)), -1).mT
        whole = scores.softmax(-1) @ values
    with absorbed:
        q_c = torch.cat((q_n @ W_k, q_p), -1).squeeze(2)  # one "key head" for all: (B, H, r + p)
        scores = q_c @ torch.cat((c, k_p), -1).squeeze(1).mT
        found = (scores.softmax(-1) @ c.squeeze(1)).unsqueeze(2) @ W_v
    torch.testing.assert_close(found, whole)
    spec, run = lab.model(shape), lab.Inference(batch=B)
    up = 2 * B * r * H * (n + v)  # W_k and W_v, for one token; among the pass's products
    assert decode_pass(spec, run, S).scores + up == absorbed.get_total_flops()
    theirs = decode_pass(spec, run, S, absorbed=False)  # as transformers does it
    assert theirs.scores + S * up == expanded.get_total_flops()
    assert theirs.products - decode_pass(spec, run, S).products == (S - 1) * up


def test_a_batch_touches_nearly_all_experts() -> None:
    spec = lab.model(MOE)
    one, many = (weights_read(spec, lab.Inference(), tokens) for tokens in (1, 256))
    parts = spec.parameters_by_component
    assert one == pytest.approx(2 * (spec.active_parameters - parts["embedding"]), rel=1e-6)
    assert many == pytest.approx(2 * (spec.parameters - parts["embedding"]), rel=1e-3)


def test_kernels_started_from_a_graph_are_faster_and_as_published() -> None:
    rates, spec = efficiency("A100-80GB"), lab.model(LLAMA)
    run = lab.Inference(prompt_len=5, new_tokens=200)
    first, each = token_seconds(spec, run, rates, eager=False)
    slow_first, slow = token_seconds(spec, run, rates)
    assert slow > 2.5 * each and slow_first >= first
    assert 1 / each == pytest.approx(figure("gpt-fast-decoding")["Llama-2-7B, bf16"], rel=0.05)
    assert token_seconds(spec, lab.Inference(weights="fp32"), rates) is None


def test_generate_waits_for_the_cpu_also_where_no_host_was_measured() -> None:
    """No record of an H100 has the time of a launch: the host of the A100's records stands for it."""
    run = lab.Inference(prompt_len=128, new_tokens=100)
    ours, theirs = (lab.estimate("Qwen/Qwen3-0.6B", run, gpu).step_seconds for gpu in ("H100", "A100-80GB"))
    assert ours == pytest.approx(theirs, rel=0.05)


def test_a_note_leads_from_generate_to_the_engines() -> None:
    (note,) = [n for n in lab.estimate("meta-llama/Llama-3.1-8B", lab.Inference(), "H100").notes if n.code == "serving"]
    assert "llmlab serve" in note
