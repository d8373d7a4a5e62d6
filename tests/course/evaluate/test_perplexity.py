"""Perplexity by windows equals scoring one token at a time with the same context."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from llmlab.base.errors import SpecError
from llmlab.course.architectures.llama import Llama
from llmlab.course.evaluate import perplexity
from llmlab.course.evaluate.perplexity import windows

TOKENS = 29


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(50, (TOKENS,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def one_at_a_time(model: GPT2LMHeadModel, ids: torch.Tensor, begins: dict[int, int]) -> float:
    """exp(mean nll), token t predicted from ids[begins[t]:t] alone."""
    nll = 0.0
    for t, begin in begins.items():
        nll -= model(ids[None, begin:t]).logits[0, -1].double().log_softmax(-1)[ids[t]].item()
    return math.exp(nll / len(begins))


def test_a_text_inside_the_window_is_scored_whole(model: GPT2LMHeadModel, ids: torch.Tensor) -> None:
    short = ids[:12]
    found = perplexity(model, short)
    assert found.tokens == 11
    assert float(found) == pytest.approx(one_at_a_time(model, short, dict.fromkeys(range(1, 12), 0)), rel=1e-5)
    assert float(found) == pytest.approx(math.exp(model(short[None], labels=short[None]).loss.item()), rel=1e-5)


@pytest.mark.parametrize("stride", [1, 4, 8, 15])
def test_each_token_has_at_least_window_less_stride_tokens_of_context(
    model: GPT2LMHeadModel, ids: torch.Tensor, stride: int
) -> None:
    begins = {t: begin for begin, scored, end in windows(TOKENS, 16, stride) for t in range(scored, end)}
    assert all(t - begin >= min(16 - stride, t) for t, begin in begins.items())
    assert float(perplexity(model, ids, window=16, stride=stride)) == pytest.approx(
        one_at_a_time(model, ids, begins), rel=1e-5
    )


def test_our_own_models_are_read_no_further_than_their_context() -> None:
    shape = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 1, "vocab_size": 50, "max_position_embeddings": 16}  # fmt: skip
    ours, ids = Llama.from_spec(shape).eval(), torch.arange(40)
    assert float(perplexity(ours, ids)) == float(perplexity(ours, ids, 16, 8))
    with pytest.raises(SpecError, match="at most 16"):
        perplexity(ours, ids, window=17)


def test_windows_side_by_side_share_the_one_token_that_the_next_is_predicted_from(
    model: GPT2LMHeadModel, ids: torch.Tensor
) -> None:
    assert float(perplexity(model, ids, 16, 16)) == float(perplexity(model, ids, 16, 15))


@given(st.integers(2, 60), st.integers(2, 20), st.integers(1, 19))
def test_every_token_but_the_first_is_scored_once(tokens: int, window: int, stride: int) -> None:
    passes = windows(tokens, window, min(stride, window - 1))
    assert [t for _, scored, end in passes for t in range(scored, end)] == list(range(1, tokens))
    assert all(begin < scored and end - begin <= window for begin, scored, end in passes)


def test_a_uniform_model_hesitates_between_the_whole_vocabulary_and_words_are_counted_apart(
    ids: torch.Tensor,
) -> None:
    found = perplexity(lambda x: torch.zeros(*x.shape, 50), ids)
    assert float(found) == pytest.approx(50)
    assert found.per(found.tokens) == pytest.approx(float(found))
    assert found.per(14) == pytest.approx(50**2)  # 28 tokens scored in 14 words
    assert found.bits_per(28) == pytest.approx(math.log2(50))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1,), {}, "at least 2 tokens"),
        ((2, 8), {}, "one text"),
        ((20,), {"window": 8, "stride": 9}, "stride"),
        ((20,), {"window": 1}, "window"),
        ((20,), {"window": 17}, "at most 16"),
    ],
)
def test_perplexity_says_what_it_needs(
    model: GPT2LMHeadModel, shape: tuple[int, ...], options: dict[str, int], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        perplexity(model, torch.zeros(shape, dtype=torch.long), **options)


def test_ids_of_another_tokenizer_are_named() -> None:
    with pytest.raises(SpecError, match="token id 60"):
        perplexity(lambda x: torch.zeros(*x.shape, 50), torch.tensor([1, 60]))


@pytest.mark.parametrize("wrong", [-1, 50])
def test_a_models_own_vocabulary_is_asked_before_it_reads(wrong: int) -> None:
    shape = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 1, "vocab_size": 50, "max_position_embeddings": 16}  # fmt: skip
    with pytest.raises(SpecError, match=rf"token id {wrong}: .* has 50"):  # else an embedding's IndexError
        perplexity(Llama.from_spec(shape).eval(), torch.tensor([3, wrong, 7]))
