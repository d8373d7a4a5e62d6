"""Llama from scratch: its cache, padding, RoPE against its promise, and what its class does not implement. GPT and
Llama against transformers' classes with the same weights, and against what causality means."""

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import llmlab as lab
from llmlab.course.architectures.gpt import GPT, visible
from llmlab.course.architectures.llama import Llama, RMSNorm, frequencies, rope_settings, rotate
from llmlab.course.inference import GrowingCache, generate

CONFIG = {"model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
          "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128,
          "bos_token_id": None, "eos_token_id": None}  # fmt: skip
LLAMA3 = {"rope_theta": 500000.0,
          "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 32}}  # fmt: skip
WITHIN = {"rtol": 0, "atol": 1e-5}  # logits and gradients of order 1, fp32
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 300,
        "bos_token_id": None, "eos_token_id": None}  # fmt: skip
CHANGES = [
    *((GPT, GPT2, changes) for changes in (
        {}, {"tie_word_embeddings": False}, {"n_inner": 80}, {"layer_norm_epsilon": 0.1})),
    *((Llama, CONFIG, changes) for changes in (
        {}, LLAMA3, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {"num_key_value_heads": 6},
        {"num_key_value_heads": 1}, {"head_dim": 12, "tie_word_embeddings": True}, {"rms_norm_eps": 0.1})),
]  # fmt: skip
each_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@pytest.fixture(scope="module")
def theirs(transformers_model):
    return transformers_model(CONFIG, **LLAMA3)


def test_the_cache_holds_the_key_value_heads(theirs, ids):
    cache = GrowingCache()
    Llama.from_transformers(theirs)(ids, cache)
    keys, values = cache.layers[0]
    assert keys.shape == values.shape == (3, 2, 40, 8)
    assert 3 * (keys[0].numel() + values[0].numel()) == 40 * lab.model(theirs.config).kv_elements_per_token


def test_left_padding_needs_a_mask_but_no_positions(theirs, ids):
    """A score depends on the distance of two tokens alone, so all of them may be shifted."""
    ours = Llama.from_transformers(theirs)
    text = ids[:1, :10]
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), text), dim=1)
    mask = visible(14, 14, torch.arange(14)[None] >= 4)
    torch.testing.assert_close(ours(padded, mask=mask)[:, 4:], ours(text), **WITHIN)
    assert (ours(padded)[:, 4:] - ours(text)).abs().max() > 0.01


def test_half_precision_positions_stay_exact(theirs):
    """bf16 cannot tell position 257 from 256: angles are made in fp32 whatever the weights are in."""
    ours = Llama.from_transformers(theirs).bfloat16()
    seen = []
    ours.run_blocks = lambda blocks, x, turn, *rest: seen.append(turn) or x
    ours(torch.zeros(1, 300, dtype=torch.long))
    angles = torch.arange(300)[:, None] * frequencies(ours.rope, 8)
    assert torch.equal(seen[0][0][0, :, :4], angles.cos().bfloat16())


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"])
def test_published_scaling_is_that_of_transformers(name):
    spec = lab.model(name)
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**spec.config))
    assert scale == 1.0
    torch.testing.assert_close(frequencies(rope_settings(spec), spec.head_dim), expected, rtol=1e-5, atol=0)


def test_a_turned_score_depends_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64, generator=generator, dtype=torch.float64)
    turns = frequencies({"rope_type": "default", "rope_theta": 10000.0}, 64).double()

    def score(m, n):
        (q_m, k_n) = (
            rotate(x, (p * turns).repeat(2).cos()[None, None], (p * turns).repeat(2).sin()[None, None])
            for x, p in ((q, m), (k, n))
        )
        return (q_m * k_n).sum().item()

    assert score(12, 5) == pytest.approx(score(1007, 1000), abs=1e-9)
    assert score(12, 5) != pytest.approx(score(12, 6), abs=1e-3)
    assert score(5, 5) == pytest.approx((q * k).sum().item())


def test_rmsnorm_is_torchs_and_keeps_the_dtype():
    x = torch.randn(4, 7, 32, generator=torch.Generator().manual_seed(0)) * 5 + 3
    ours = RMSNorm(32, 1e-5)
    torch.nn.init.normal_(ours.weight)
    expected = torch.nn.functional.rms_norm(x, (32,), ours.weight, 1e-5)
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-6)
    assert ours.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    large = torch.full((1, 32), 300.0, dtype=torch.float16)  # 300² is beyond fp16's 65504
    assert RMSNorm(32, 1e-5).half()(large).eq(1).all()


def test_parameters_are_the_published_count():
    with torch.device("meta"):
        assert sum(p.numel() for p in Llama.from_spec("meta-llama/Llama-3.1-8B").parameters()) == 8_030_261_248
        tied = Llama.from_spec("meta-llama/Llama-3.2-1B")
    assert sum(p.numel() for p in tied.parameters()) == lab.model("meta-llama/Llama-3.2-1B").parameters


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("gpt2", "gpt2 is a gpt2; this class is llama"),
        ({**CONFIG, "attention_bias": True}, "attention_bias=True is not implemented"),
        ({**CONFIG, "hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
        ({**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not implemented"),
    ],
)
def test_what_it_cannot_be_is_refused(source, said):
    with torch.device("meta"), pytest.raises(lab.SpecError, match=said):
        Llama.from_spec(source)


@pytest.fixture(scope="module", params=[(GPT, GPT2), (Llama, {**CONFIG, **LLAMA3})], ids=["gpt", "llama"])
def pair(request, transformers_model):
    """The class from scratch, and transformers' model."""
    ours, config = request.param
    return ours, transformers_model(config)


@each_attention
@pytest.mark.parametrize(("architecture", "config", "changes"), CHANGES)
def test_logits_and_gradients_are_those_of_transformers(transformers_model, ids, attention, architecture, config,
                                                        changes):  # fmt: skip
    theirs = transformers_model(config, **changes)
    ours = architecture.from_transformers(theirs, attention)
    expected = theirs(ids).logits
    torch.testing.assert_close(ours(ids), expected, **WITHIN)
    expected.square().mean().backward()
    ours(ids).square().mean().backward()
    prefix = "transformer." if architecture is GPT else "model."
    gradients = {name.removeprefix(prefix): parameter.grad for name, parameter in theirs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == set(gradients)
    for name, parameter in ours.named_parameters():
        expected = gradients[name]
        expected = expected.t() if expected.shape != parameter.shape or "c_proj.w" in name else expected
        torch.testing.assert_close(parameter.grad, expected, **WITHIN, msg=lambda m, name=name: f"{name}: {m}")


@each_attention
def test_greedy_generation_is_that_of_transformers_with_and_without_a_cache(pair, ids, attention):
    architecture, theirs = pair
    ours = architecture.from_transformers(theirs, attention)
    expected = theirs.generate(ids[:, :9], max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert expected.unique().numel() > 27, "the prompts' tokens alone would prove nothing"
    assert torch.equal(generate(ours, ids[:, :9], 30, cache="none"), expected)
    assert torch.equal(generate(ours, ids[:, :9], 30), expected)


@each_attention
def test_a_text_in_chunks_through_the_cache_gives_the_logits_of_the_whole(pair, ids, attention):
    architecture, theirs = pair
    ours, cache = architecture.from_transformers(theirs, attention), GrowingCache()
    pieces = [ours(chunk, cache) for chunk in ids.split([7, 1, 20, 12], dim=1)]
    assert cache.length == 40
    torch.testing.assert_close(torch.cat(pieces, dim=1), ours(ids), **WITHIN)


@each_attention
def test_a_later_token_changes_no_earlier_logit(pair, ids, attention):
    architecture, theirs = pair
    ours = architecture.from_transformers(theirs, attention)
    other = ids.clone()
    other[:, 25] = (other[:, 25] + 1) % 300
    changed = (ours(ids) != ours(other)).any(-1)  # (B, T)
    assert not changed[:, :25].any()
    assert changed[:, 25:].all()
