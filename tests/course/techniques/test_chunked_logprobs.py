"""Log-probabilities by tiles equal those of whole logits, and so do their gradients."""

import pytest
import torch

from llmlab.course.techniques import chunked_logprobs as chunked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_give_the_log_probabilities_and_gradients_of_whole_logits(dtype, monkeypatch):
    for name, size in (("TOKENS", 7), ("WORDS", 11), ("ROWS", 3)):  # none divides the sizes below
        monkeypatch.setattr(chunked, name, size)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 8, dtype=dtype, requires_grad=True) for size in (20, 30))
    targets, factors = torch.randint(30, (20,)), torch.arange(20.0)

    def gradients(log_probs):
        return torch.autograd.grad((log_probs * factors).sum(), (hidden, weight))

    found = chunked.chunked_log_probs(hidden, weight, targets)
    expected = (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_whole_logits_give_the_gradient_of_log_softmax():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 9, 30, requires_grad=True), torch.randint(30, (2, 8))
    found = chunked.log_probs(logits[:, :-1], targets)
    expected = logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(found, expected)
    mine, theirs = (torch.autograd.grad(each.square().sum(), logits)[0] for each in (found, expected))
    torch.testing.assert_close(mine, theirs)
