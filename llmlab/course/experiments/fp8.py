"""A small Llama for the page on fp8: a short training run, and the operands of its linear layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from ...data import split, windows
from ...specs.model import model
from ..architectures.llama import Llama

VOCAB, TOKENS, MICRO_BATCH, RATE = 512, 32, 16, 3e-3
# A mean over the 4,096 tokens of the job makes gradients 8 times smaller than a mean over the 512 tokens here. Dividing
# the loss by 8 does the same. AdamW's updates hardly depend on it.
FEWER = 8
Convert = Callable[[Llama], None]


@cache
def text() -> tuple[Tensor, Tensor]:
    """Return the ids of the text to train on, and of the part that is held out."""
    return split(VOCAB)


def small_llama(seed: int) -> Llama:
    """Return a Llama with two blocks of width 64 and random weights."""
    torch.manual_seed(seed)
    sizes = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB, "max_position_embeddings": TOKENS,
             "tie_word_embeddings": True, "initializer_range": 0.05}  # fmt: skip
    return Llama(model(sizes))


def loss_of(llama: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss of predicting each token of `ids` (B, S + 1) from those before it."""
    logits = llama(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def trained(convert: Convert | None, seed: int, updates: int) -> Llama:
    """Return a small Llama after `updates` updates of AdamW; `convert` changes its layers before the first one.

    The seed determines the initial weights and the order of the text, whatever `convert` does.
    """
    llama = small_llama(seed)
    if convert:
        convert(llama)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=RATE)
    for ids in windows(text()[0], MICRO_BATCH * updates, TOKENS + 1, seed).split(MICRO_BATCH):
        optimizer.zero_grad()
        (loss_of(llama, ids) / FEWER).backward()
        optimizer.step()
    return llama


def held_out_loss(llama: nn.Module) -> float:
    """Return the mean loss on 256 windows of text that `trained` never sees."""
    with torch.no_grad():
        return loss_of(llama, windows(text()[1], 256, TOKENS + 1, seed=0)).item()


def operands(llama: Llama, seed: int = 0) -> dict[str, list[Tensor]]:
    """Return the inputs, the weights and the gradients of the outputs of all linear layers, in one forward and backward
    pass on new text."""
    tensors: dict[str, list[Tensor]] = {"inputs": [], "weights": [], "gradients": []}

    def forward(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        tensors["inputs"].append(inputs[0].detach().flatten(0, -2))
        tensors["weights"].append(layer.get_parameter("weight").detach())
        output.register_hook(lambda gradient: tensors["gradients"].append(gradient.flatten(0, -2)))

    layers = [layer for layer in llama.layers.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_hook(forward) for layer in layers]
    (loss_of(llama, windows(text()[1], MICRO_BATCH, TOKENS + 1, seed)) / FEWER).backward()
    for hook in hooks:
        hook.remove()
    return tensors
