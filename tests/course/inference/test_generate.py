"""Every cache gives the same tokens, and they are transformers'."""

import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MinPLogitsWarper,
    MistralConfig,
    MistralForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmlab.base.errors import SpecError
from llmlab.course.architectures.llama import Llama
from llmlab.course.inference import generate, probabilities, speculate
from llmlab.course.inference.generate import CACHES

VOCAB, CONTEXT, NEW = 64, 64, 24
generating = sys.modules["llmlab.course.inference.generate"]  # the package gives the function under this name


def llama(layers: int = 2, seed: int = 0, attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,  # else the logits are so flat that rounding decides
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


def window() -> MistralForCausalLM:
    """Mistral, whose layers see the last 8 tokens only."""
    torch.manual_seed(0)
    return MistralForCausalLM(
        MistralConfig(**llama().config.to_dict() | {"model_type": "mistral"}, sliding_window=8)
    ).eval()


def latent() -> DeepseekV3ForCausalLM:
    """DeepSeek-V3, which caches one latent and one rotary key per token."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
        max_position_embeddings=CONTEXT, initializer_range=0.3, first_k_dense_replace=1,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).eval()


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "eager": lambda: llama(attention="eager"),
    "sliding window": window,
    "latent attention": latent,
}


@pytest.fixture(scope="module", params=MODELS)
def theirs(request: pytest.FixtureRequest) -> nn.Module:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def prompts() -> Tensor:
    return torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))


def reference(model: nn.Module, prompts: Tensor, **options: object) -> Tensor:
    options = {"do_sample": False, **options}
    return model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )


@pytest.mark.parametrize("cache", CACHES)
def test_greedy_tokens_are_transformers_whatever_the_cache(theirs: nn.Module, prompts: Tensor, cache: str) -> None:
    assert torch.equal(generate(theirs, prompts, NEW, cache=cache), reference(theirs, prompts))


@pytest.mark.parametrize("cache", CACHES)
def test_our_llama_writes_the_same_as_transformers(prompts: Tensor, cache: str) -> None:
    theirs = llama()
    ours = Llama.from_transformers(theirs)
    assert torch.equal(generate(ours, prompts, NEW, cache=cache), reference(theirs, prompts))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_sampled_tokens_are_transformers_with_the_same_seed(
    prompts: Tensor, cache: str, filters: dict[str, float]
) -> None:
    model = llama()
    torch.manual_seed(7)
    # transformers fills in top_k=50 where none is given
    expected = reference(model, prompts, do_sample=True, **{"top_k": 0, **filters})
    assert torch.equal(generate(model, prompts, NEW, cache=cache, seed=7, **filters), expected)


@settings(max_examples=60)
@example(scores=[1.0, 1.0, 0.0], temperature=1.0, top_k=None, top_p=None, min_p=1.0)
@example(scores=[1.0, 1.0, 0.0], temperature=1.0, top_k=1, top_p=0.5, min_p=None)
@given(
    scores=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12),
    temperature=st.floats(0.2, 3),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.floats(0.05, 1),
    min_p=st.none() | st.floats(0, 1),
)
def test_probabilities_are_transformers_for_any_logits(
    scores: list[float], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    """Ties, a k beyond the vocabulary, filters that leave one token."""
    expected = TemperatureLogitsWarper(temperature)(None, torch.tensor([scores]))
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p and top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p is not None:
        expected = MinPLogitsWarper(min_p)(None, expected)
    found = probabilities(torch.tensor([scores]), temperature, top_k, top_p, min_p)
    assert torch.equal(found, expected.softmax(-1))


@pytest.mark.parametrize("cache", [kind for kind in CACHES if kind != "none"])
@pytest.mark.parametrize("when", [1, 5])
def test_a_model_that_fails_leaves_no_cache_behind(
    prompts: Tensor, cache: str, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prompt's pass, and in the middle of decoding."""
    model, made, calls = llama(), [], []
    build = generating._cache
    monkeypatch.setattr(generating, "_cache", lambda *args: made.append(build(*args)) or made[-1])

    def fails(*args: object) -> None:
        calls.append(args)
        if len(calls) == when:
            raise RuntimeError("broken")

    model.model.layers[1].mlp.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="broken"):
        generate(model, prompts, 8, cache=cache)
    assert made[0].length == 0
    if cache == "paged":
        assert len(made[0].pool.free) == len(made[0].pool.holders)
    else:
        assert not made[0].layers


def test_another_seed_writes_another_text(prompts: Tensor) -> None:
    first, second = (generate(llama(), prompts, NEW, temperature=1, seed=seed) for seed in (1, 2))
    assert not torch.equal(first, second)


def test_one_prompt_without_a_batch_dimension_gives_one_text(prompts: Tensor) -> None:
    model = llama()
    assert torch.equal(generate(model, prompts[0], 5), generate(model, prompts, 5)[0])


@pytest.mark.parametrize("cache", ["grow", "static", "paged"])
@pytest.mark.parametrize("draft_seed", [0, 5], ids=["the model itself", "a stranger"])
def test_a_greedy_draft_changes_no_token(prompts: Tensor, cache: str, draft_seed: int) -> None:
    model, draft = llama(), llama(seed=draft_seed)
    tokens = generate(model, prompts[:1], NEW, cache=cache, draft=draft)
    assert torch.equal(tokens, generate(model, prompts[:1], NEW))


def test_a_draft_that_is_the_model_is_always_right_and_saves_passes(prompts: Tensor) -> None:
    found = speculate(llama(), llama(), prompts[:1], NEW, guesses=3)
    assert found.acceptance == 1
    assert found.passes == NEW / 4  # each gives three guesses and a token of the model's own


def test_speculation_has_the_large_models_distribution() -> None:
    """Two tokens drawn 3000 times each way: the pairs' frequencies differ by no more than chance does."""

    class Fixed(nn.Module):
        """A model of three tokens whose next token depends on the last."""

        def __init__(self, seed: int) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)) * 1.5)
            self.spec = type("Spec", (), {"vocab": 3, "max_positions": 64})()
            self.lm_head = nn.Identity()

        def hidden(self, ids: Tensor, cache: object, mask: object, positions: object) -> Tensor:
            cache.update(0, ids[:, None, :, None].float(), ids[:, None, :, None].float())
            return self.table[ids]

    model, draft = Fixed(0), Fixed(1)
    p = model.table.softmax(-1)
    expected = (p[0][:, None] * p).flatten()  # after token 0: p(first) · p(second | first)
    generator, draws = torch.Generator().manual_seed(0), 3000
    counts = torch.zeros(9)
    accepted = guessed = 0
    for _ in range(draws):
        found = speculate(model, draft, torch.tensor([[0]]), 2, generator=generator, guesses=2, temperature=1.0)
        first, second = found.ids[0, 1:].tolist()
        counts[3 * first + second] += 1
        accepted, guessed = accepted + found.accepted, guessed + found.guessed
    chi_squared = ((counts - draws * expected) ** 2 / (draws * expected)).sum().item()
    assert chi_squared < 26.1  # 8 degrees of freedom: one in a thousand exceeds it
    # a guess stands with probability sum of min(p, q), here of the first token after token 0
    overlap = torch.minimum(p[0], draft.table.softmax(-1)[0]).sum().item()
    assert accepted / guessed == pytest.approx(overlap, abs=0.04)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "empty prompt"),
        ([1] * 60, {}, "context is 64"),
        ([1, VOCAB], {}, "token 64"),
        ([1, -1], {}, "token -1"),
        ([1], {"cache": "big"}, "'big'"),
        ([1], {"temperature": -1}, "temperature=-1"),
        ([1], {"temperature": 1, "top_k": 0}, "top_k=0"),
        ([1], {"temperature": 1, "top_p": 0}, "top_p=0"),
        ([1], {"temperature": 1, "min_p": 2}, "min_p=2"),
        ([[1], [1]], {"draft": True}, "one prompt"),
    ],
)
def test_generate_says_what_it_cannot_do(ids: list, options: dict, message: str) -> None:
    model = llama()
    if "draft" in options:
        options = {"draft": model}
    with pytest.raises(SpecError, match=message):
        generate(model, torch.tensor(ids, dtype=torch.long), 10, **options)


def test_a_draft_with_another_vocabulary_is_refused(prompts: Tensor) -> None:
    other = LlamaForCausalLM(LlamaConfig(vocab_size=65, hidden_size=32, intermediate_size=48, num_hidden_layers=1))
    with pytest.raises(SpecError, match="vocabulary is 65"):
        generate(llama(), prompts[:1], 4, draft=other)


def test_top_p_keeps_the_fewest_likeliest_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert probabilities(logits, 1.0, top_p=0.7)[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert probabilities(logits, 1.0, top_p=0.4)[0].tolist() == pytest.approx([1, 0, 0, 0])
    assert probabilities(logits, 1.0, min_p=0.2)[0].tolist() == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    assert probabilities(logits, 0.0, top_k=3)[0].tolist() == [1, 0, 0, 0]
