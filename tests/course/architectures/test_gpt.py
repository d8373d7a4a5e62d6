"""GPT from scratch: padding, positions, initial values, dropout, and what its class does not implement."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import llmlab as lab
from llmlab.course.architectures.gpt import GPT, attend, in_order, visible
from llmlab.course.inference import GrowingCache

CONFIG = {"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 300,
          "bos_token_id": None, "eos_token_id": None}  # fmt: skip
WITHIN = {"rtol": 0, "atol": 1e-5}  # logits and gradients of order 1, fp32
each_attention = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@pytest.fixture(scope="module")
def theirs(transformers_model):
    return transformers_model(CONFIG)


@each_attention
def test_left_padding_needs_mask_and_positions(theirs, ids, attention):
    ours = GPT.from_transformers(theirs, attention)
    text = ids[:1, :10]
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), text), dim=1)
    real = torch.arange(14)[None] >= 4
    mask, positions = visible(14, 14, real), (real.cumsum(-1) - 1).clamp(min=0)
    expected = ours(text)
    torch.testing.assert_close(ours(padded, mask=mask, positions_BS=positions)[:, 4:], expected, **WITHIN)
    for wrong in ({}, {"mask": mask}, {"positions_BS": positions}):
        assert (ours(padded, **wrong)[:, 4:] - expected).abs().max() > 0.01
    same = theirs(padded, attention_mask=real.long(), position_ids=positions).logits[:, 4:]
    torch.testing.assert_close(same, expected, **WITHIN)


def test_padding_hides_from_everyone_but_itself_and_gives_no_nan(theirs):
    real = torch.tensor([[False, False, True, True]])
    seen = visible(4, 4, real)[0, 0].int().tolist()
    assert seen == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert visible(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    for attention in ("eager", "sdpa"):
        ours = GPT.from_transformers(theirs, attention)
        assert ours(torch.zeros(1, 4, dtype=torch.long), mask=visible(4, 4, real)).isfinite().all()


def test_the_scores_variance_is_that_of_the_inputs():
    """With unit normal q and k the scores' variance is D before the division, and 1 after it."""
    q, k = torch.randn(2, 1, 4, 200, 64, generator=torch.Generator().manual_seed(0))
    v = torch.eye(200).expand(1, 4, 200, 200)  # the output is then the attention weights
    weights = attend(q, k, v, torch.ones(200, 200, dtype=torch.bool), "eager")
    scores = weights.log()
    assert (scores - scores.mean(-1, keepdim=True)).var().item() == pytest.approx(1, rel=0.05)


def test_parameters_are_the_published_count():
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT.from_spec("gpt2").parameters()) == 124_439_808
        xl = GPT.from_spec("gpt2-xl")
    assert sum(p.numel() for p in xl.parameters()) == lab.model("gpt2-xl").parameters


def test_the_first_loss_is_that_of_a_guess():
    torch.manual_seed(0)
    model = GPT.from_spec(CONFIG).eval()
    ids = torch.randint(300, (8, 64))
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), torch.randint(300, (8 * 64,)))
    assert loss.item() == pytest.approx(math.log(300), abs=0.05)
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))
    last, other = (model.h[0].mlp.c_proj.weight.std().item(), model.h[0].mlp.c_fc.weight.std().item())
    assert other == pytest.approx(0.02, rel=0.05) and last == pytest.approx(0.02 / math.sqrt(6), rel=0.05)


@each_attention
def test_eval_turns_all_dropout_off(ids, attention):
    rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    for alone in rates:
        config = {**CONFIG, **dict.fromkeys(rates, 0.0), alone: 0.5}
        model = GPT.from_spec(config, attention)
        assert not torch.equal(model(ids), model(ids)), f"{alone} drops nothing in train()"
        model.eval()
        assert torch.equal(model(ids), model(ids))


def test_blocks_can_be_run_by_another_function(theirs, ids):
    """Checkpointed two at a time: the same gradients."""
    ours = GPT.from_transformers(theirs)

    def gradients():
        ours.zero_grad()
        ours(ids).square().mean().backward()
        return [p.grad.clone() for p in ours.parameters()]

    calls = []

    def checkpointed(blocks, x, *rest):
        for start in range(0, len(blocks), 2):
            calls.append(start)
            x = checkpoint(in_order, blocks[start : start + 2], x, *rest, use_reentrant=False)
        return x

    plain = gradients()
    ours.run_blocks = checkpointed
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    assert calls == [0, 2]


@pytest.mark.parametrize(
    ("source", "attention", "said"),
    [
        (CONFIG, "flash", "attention='flash' is not one of eager, sdpa"),
        ("meta-llama/Llama-3.2-1B", "sdpa", "is a llama; this class is gpt2"),
        ({**CONFIG, "activation_function": "relu"}, "sdpa", "activation_function='relu' is not implemented"),
        ({**CONFIG, "scale_attn_by_inverse_layer_idx": True}, "sdpa", "scale_attn_by_inverse_layer_idx=True"),
    ],
)
def test_what_it_cannot_be_is_refused(source, attention, said):
    with torch.device("meta"), pytest.raises(lab.SpecError, match=said):
        GPT.from_spec(source, attention)


def test_more_tokens_than_positions_are_refused(theirs):
    ours = GPT.from_transformers(theirs)
    with pytest.raises(lab.SpecError, match="65 tokens are beyond the 64 positions"):
        ours(torch.zeros(1, 65, dtype=torch.long))
    cache = GrowingCache()
    ours(torch.zeros(1, 60, dtype=torch.long), cache)
    with pytest.raises(lab.SpecError, match="65 tokens are beyond"):
        ours(torch.zeros(1, 5, dtype=torch.long), cache)
