"""The toy of the page on fp8: seeds decide everything but the layers' code, and operands come from the blocks alone."""

import torch

from llmlab.course.experiments.fp8 import FEWER, held_out_loss, loss_of, operands, small_llama, text, trained
from llmlab.data import windows


def test_one_seed_gives_the_same_weights_whatever_convert_does():
    converted = []
    plain, other = trained(None, 0, 1), trained(converted.append, 0, 1)
    assert converted == [other]
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), other.parameters(), strict=True))
    assert held_out_loss(plain) == held_out_loss(other) != held_out_loss(trained(None, 1, 1))


def test_the_operands_are_those_of_the_seven_linear_layers_of_two_blocks():
    llama = small_llama(0)
    found = operands(llama)
    assert {kind: len(tensors) for kind, tensors in found.items()} == {"inputs": 14, "weights": 14, "gradients": 14}
    weight_gradients = [gradient.T @ x for gradient, x in zip(found["gradients"][::-1], found["inputs"], strict=True)]
    first = llama.layers[0].self_attn.q_proj.weight.grad
    assert any(torch.allclose(first, each, atol=1e-7) for each in weight_gradients if each.shape == first.shape)


def test_gradients_are_those_of_a_mean_over_eight_times_the_tokens():
    llama = small_llama(0)
    operands(llama)
    small = llama.norm.weight.grad.clone()
    llama.zero_grad()
    loss_of(llama, windows(text()[1], 16, 33, seed=0)).backward()
    assert torch.allclose(llama.norm.weight.grad, FEWER * small, rtol=1e-4)
