"""Eight bits change no token of a small model, four bits half the bytes again; the bytes are transformers'."""

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import QuantizedCache as Theirs

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.course.inference.cache import GrowingCache
from llmlab.course.inference.forward import logits
from llmlab.course.inference.quantized_cache import QuantizedCache, narrow, widen
from llmlab.formulas.inference import kv_cache_bytes

SHAPE = {"model_type": "llama", "vocab_size": 300, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, initializer_range=0.1)).eval()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_number_is_off_by_half_a_step_at_most(bits: int) -> None:
    x = torch.randn(2, 4, 5, 32, generator=torch.Generator().manual_seed(0))
    rounded = narrow(x, bits)
    assert sum(t.nbytes for t in rounded) == x.numel() * bits // 8 + x.numel() // 64 * 4
    groups = x.transpose(1, 2).reshape(2, 5, 2, 64)
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    error = (widen(rounded, bits, 4, x.dtype) - x).transpose(1, 2).reshape(2, 5, 2, 64).abs().amax(-1)
    assert (error <= 0.5 * step * 1.01 + 2**-9).all()  # and what fp16 rounds the smallest value by
    assert error.amax() > 0.3 * step.amax()


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
def test_decoding_over_rounded_keys_and_values_is_close_and_never_rounds_twice(model: nn.Module, bits: int) -> None:
    ids = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(1))
    exact, rounded = GrowingCache(), QuantizedCache(bits)
    once: Tensor | None = None
    for i in range(30, 40):
        unread = ids[:, :31] if i == 30 else ids[:, i : i + 1]
        wide, narrowed = (logits(model, unread, cache) for cache in (exact, rounded))
        codes = rounded.layers[0][0][0][:, :31]
        assert once is None or torch.equal(codes, once)
        once = codes.clone()
    error = (wide - narrowed).norm() / wide.norm()
    assert 0 < error < (0.03 if bits == 8 else 0.3)
    assert rounded.length == exact.length == 40
    rounded.crop(7)
    assert rounded.length == 7
    rounded.release()
    assert rounded.length == 0


@torch.no_grad()
@pytest.mark.parametrize(("kv", "bits"), [("int8", 8), ("int4", 4)])
def test_its_bytes_are_the_formulas(model: nn.Module, kv: str, bits: int) -> None:
    cache = QuantizedCache(bits)
    logits(model, torch.ones(3, 50, dtype=torch.long), cache)
    logits(model, torch.ones(3, 1, dtype=torch.long), cache)
    held = sum(t.nbytes for layer in cache.layers for kind in layer for t in kind)
    assert held == kv_cache_bytes(lab.model(SHAPE), lab.Inference(batch=3, kv=kv), tokens=51)


@torch.no_grad()
def test_transformers_fp8_cache_takes_the_formulas_bytes_and_a_scale_a_tensor(model: nn.Module) -> None:
    cache = Theirs("fp8", model.config)
    model(torch.ones(3, 50, dtype=torch.long), past_key_values=cache)
    held = sum(t.nbytes for layer in cache.layers for pair in (layer._quantized_keys, layer._quantized_values)
               for t in pair)  # fmt: skip
    assert held == kv_cache_bytes(lab.model(SHAPE), lab.Inference(batch=3, kv="fp8"), tokens=50) + 2 * 2 * 4


@pytest.mark.parametrize("kv", ["fp32", "fp8", "int8", "int4"])
def test_estimated_simulated_and_measured_caches_are_equal_to_the_byte(kv: str) -> None:
    """After the prompt, and of the estimate the last token's moment: on the GPU each scale takes 512 bytes."""
    run = lab.Inference(batch=2, prompt_len=256, new_tokens=3, weights="fp32", kv=kv)
    scales = 2 * 2 * 4 if kv == "fp8" else 0
    expected = kv_cache_bytes(lab.model(SHAPE), run, tokens=256)
    for report in (lab.measure(SHAPE, run, "cpu", repeats=1), lab.simulate(SHAPE, run, "cpu")):
        assert next(parts for phase, parts in report.timeline if phase == "decode")["kv_cache"] == expected + scales
    card = lab.simulate(SHAPE, run, "T4")
    assert next(p for phase, p in card.timeline if phase == "decode")["kv_cache"] == expected + scales // 4 * 512
    assert lab.estimate(SHAPE, run).phases["decode"] > lab.estimate(SHAPE, run).phases["load"] + expected


@pytest.mark.parametrize("kv", ["fp8", "int4"])
def test_a_sliding_window_in_few_bits_is_refused(kv: str) -> None:
    windowed = {**SHAPE, "model_type": "mistral", "sliding_window": 16}
    with pytest.raises(lab.NotAvailable, match="sliding window"):
        lab.simulate(windowed, lab.Inference(prompt_len=8, new_tokens=2, weights="fp32", kv=kv), "cpu")


def test_wrong_bits_and_heads_that_do_not_fall_into_groups_are_refused() -> None:
    with pytest.raises(SpecError, match="bits=3"):
        QuantizedCache(3)
    with pytest.raises(SpecError, match="3 heads of 20 do not fall into groups of 64"):
        QuantizedCache().update(0, *torch.ones(2, 1, 3, 4, 20))


@pytest.mark.parametrize(("kv", "theirs"), [("int4", 2 * (6144 + 384 + 384)), ("int8", 2 * (12288 + 384 + 384))])
def test_transformers_int_caches_take_the_same_bytes(kv: str, theirs: int) -> None:
    """What optimum-quanto 0.2.7 (4 bits) and HQQ 0.2.8 (4 and 8) were seen to hold of one layer in transformers 5.23:
    codes, scales and zero points of keys and of values, after a prompt of 192 tokens, 2 kv heads of 32. Neither is a
    dependency: importing them compiles C++, or makes every import of transformers slower."""
    shape = {**SHAPE, "num_hidden_layers": 1}
    assert kv_cache_bytes(lab.model(shape), lab.Inference(kv=kv), tokens=192) == theirs
