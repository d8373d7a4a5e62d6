"""GPT and Llama from scratch against transformers' classes with the same weights, and against what causality means."""

import pytest
import torch

from llmlab.course.architectures.gpt import GPT
from llmlab.course.architectures.llama import Llama
from llmlab.course.inference import GrowingCache, generate

GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 300,
        "bos_token_id": None, "eos_token_id": None}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128,
         "bos_token_id": None, "eos_token_id": None}  # fmt: skip
LLAMA3 = {"rope_theta": 500000.0,
          "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 32}}  # fmt: skip
WITHIN = {"rtol": 0, "atol": 1e-5}  # logits and gradients of order 1, fp32
CHANGES = [
    *((GPT, GPT2, changes) for changes in (
        {}, {"tie_word_embeddings": False}, {"n_inner": 80}, {"layer_norm_epsilon": 0.1})),
    *((Llama, LLAMA, changes) for changes in (
        {}, LLAMA3, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {"num_key_value_heads": 6},
        {"num_key_value_heads": 1}, {"head_dim": 12, "tie_word_embeddings": True}, {"rms_norm_eps": 0.1})),
]  # fmt: skip
pytestmark = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@pytest.fixture(scope="module", params=[(GPT, GPT2), (Llama, {**LLAMA, **LLAMA3})], ids=["gpt", "llama"])
def pair(request, transformers_model):
    """The class from scratch, and transformers' model."""
    ours, config = request.param
    return ours, transformers_model(config)


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


def test_greedy_generation_is_that_of_transformers_with_and_without_a_cache(pair, ids, attention):
    architecture, theirs = pair
    ours = architecture.from_transformers(theirs, attention)
    expected = theirs.generate(ids[:, :9], max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert expected.unique().numel() > 27, "the prompts' tokens alone would prove nothing"
    assert torch.equal(generate(ours, ids[:, :9], 30, cache="none"), expected)
    assert torch.equal(generate(ours, ids[:, :9], 30), expected)


def test_a_text_in_chunks_through_the_cache_gives_the_logits_of_the_whole(pair, ids, attention):
    architecture, theirs = pair
    ours, cache = architecture.from_transformers(theirs, attention), GrowingCache()
    pieces = [ours(chunk, cache) for chunk in ids.split([7, 1, 20, 12], dim=1)]
    assert cache.length == 40
    torch.testing.assert_close(torch.cat(pieces, dim=1), ours(ids), **WITHIN)


def test_a_later_token_changes_no_earlier_logit(pair, ids, attention):
    architecture, theirs = pair
    ours = architecture.from_transformers(theirs, attention)
    other = ids.clone()
    other[:, 25] = (other[:, 25] + 1) % 300
    changed = (ours(ids) != ours(other)).any(-1)  # (B, T)
    assert not changed[:, :25].any()
    assert changed[:, 25:].all()
