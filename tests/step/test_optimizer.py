"""The states of each optimizer."""

import torch
from torch import nn

import llmlab as lab
from llmlab.step.model import build_model
from llmlab.step.optimizer import build_muon, build_optimizer, in_blocks


def test_state_bytes_a_parameter():
    weight = nn.Parameter(torch.zeros(128, 256))
    bytes_of = {}
    for name in ("sgd", "adamw", "adamw-fused", "adamw-8bit", "adafactor", "lion"):
        weight.grad = torch.ones_like(weight)
        optimizer = build_optimizer(name, [weight])
        optimizer.step()
        state = optimizer.state[weight].values() if optimizer.state else []
        bytes_of[name] = sum(v.nbytes for v in state if isinstance(v, torch.Tensor) and v.numel() > 1)
    n, code_books = 128 * 256, 2 * 256 * 4
    assert bytes_of["sgd"] == 0
    assert bytes_of["adamw"] == bytes_of["adamw-fused"] == 8 * n
    assert bytes_of["lion"] == 4 * n
    assert bytes_of["adafactor"] == 4 * (128 + 256)
    assert bytes_of["adamw-8bit"] == 2 * (n + 4 * n // 256) + code_books


def test_muon_steps_the_blocks_matrices_and_adamw_the_rest():
    """Of two blocks four matrices of attention and three of the MLP; not the table, the head and five norms."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "vocab_size": 100, "max_position_embeddings": 32, "tie_word_embeddings": False}  # fmt: skip
    model = build_model(lab.model({"model_type": "llama", **sizes}), lab.Training(seq_len=16), "cpu")
    matrices = in_blocks(model)
    assert matrices.count(True) == 2 * (4 + 3) and matrices.count(False) == 1 + 1 + 5
    optimizer = build_muon(list(model.parameters()), matrices, None)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
