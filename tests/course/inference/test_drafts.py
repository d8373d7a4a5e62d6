"""Drafts: guesses that change nothing but the time."""

import pytest
import torch

from llmlab.base.errors import SpecError
from llmlab.course.architectures.llama import Llama
from llmlab.course.inference import generate, speculate
from llmlab.course.inference.drafts import Bigram, first_blocks
from llmlab.course.inference.speculative import speedup, tokens_per_pass

CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
          "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 128,
          "initializer_range": 0.4}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    return Llama.from_spec(CONFIG).eval()


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.randint(32, (500,), generator=torch.Generator().manual_seed(0))


def test_a_bigram_is_the_shares_of_the_pairs(model: Llama, text: torch.Tensor) -> None:
    draft = Bigram(text, model.spec, smoothing=1e-6)
    after = text[1:][text[:-1] == 5]
    expected = torch.bincount(after, minlength=32) / len(after)
    found = draft.hidden(torch.tensor([[9, 5]])).softmax(-1)[0, 1]
    assert torch.allclose(found, expected.float(), atol=1e-4)


@pytest.mark.parametrize("kind", ["bigram", "blocks"])
def test_each_draft_leaves_the_models_text_as_it_is(model: Llama, text: torch.Tensor, kind: str) -> None:
    draft = Bigram(text, model.spec) if kind == "bigram" else first_blocks(model, 2)
    expected = generate(model, text[:10], 40)
    assert torch.equal(generate(model, text[:10], 40, draft=draft), expected)
    found = speculate(model, draft, text[None, :10], 40)
    assert found.passes < 40 or found.accepted == 0


def test_the_first_blocks_are_the_models_own(model: Llama) -> None:
    short = first_blocks(model, 2)
    assert len(model.layers) == 3 and len(short.layers) == 2 and short.spec.layers == 2
    assert short.layers[1] is model.layers[1] and short.embed_tokens is model.embed_tokens
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(first_blocks(model, 3)(ids), model(ids))
    assert not torch.allclose(short(ids), model(ids))
    with pytest.raises(SpecError, match="has 3 blocks"):
        first_blocks(model, 4)


def test_a_pass_gives_the_sum_of_the_chances_that_all_guesses_so_far_stand() -> None:
    """Leviathan et al. 2023: equation 1, and the table's case of alpha 0.8, 5 guesses, a draft of 5 % of the cost."""
    assert tokens_per_pass(0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert speedup(0.8, 5, 0.05) == pytest.approx(3.69 / 1.25, rel=1e-3)
    assert speedup(0.0, 4, 0.1) < 1


def test_counting_passes_agrees_with_equation_1(model: Llama) -> None:
    """A draft that is right with a chance of its own, whatever went before: passes are counted, not modelled."""

    class Coin(Llama):
        """The model's logits with another token put first at random."""

        def hidden(self, *args, **kwargs):
            x = super().hidden(*args, **kwargs)
            wrong = torch.rand(x.shape[:2], generator=coin) > 0.7
            return torch.where(wrong[..., None], -x, x)

    coin = torch.Generator().manual_seed(3)
    draft = Coin.from_spec(CONFIG).eval()
    draft.load_state_dict(model.state_dict())
    found = [speculate(model, draft, torch.tensor([[i, 1]]), 120, guesses=3) for i in range(6)]
    accepted, refused, passes = (sum(getattr(f, name) for f in found) for name in ("accepted", "refused", "passes"))
    chance = accepted / (accepted + refused)
    assert 0.6 < chance < 0.8
    assert 6 * 120 / passes == pytest.approx(tokens_per_pass(chance, 3), rel=0.05)
