"""Stage 1, GPT from scratch: the model, and a plain trainer."""

import math

import torch
from helpers import V, error, moved, padded, plain_gradient, small_gpt, small_llama, texts
from yours import gpt, trainer

from llmlab.course.architectures import llama
from llmlab.notebook.exercises import gpt as facts
from llmlab.notebook.quiz import broken


def test_leaks():
    assert broken(gpt.leaks, facts.leaks) == {}
    assert not gpt.leaks(small_gpt(), torch.arange(32)[None])


def test_rope():
    assert broken(gpt.rope, facts.rope) == {}


def test_your_llama_is_the_one_of_the_package():
    config = {
        "model_type": "llama", "vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    package, model = llama.Llama.from_spec(config), small_llama()
    names = {"embed_tokens": "wte", "layers": "h", "norm": "ln_f"}
    weights = {names.get(name.partition(".")[0], name.partition(".")[0]) + "." + name.partition(".")[2]: weight
               for name, weight in package.state_dict().items()}  # fmt: skip
    model.load_state_dict(weights)
    ids = texts([64])[0][None]
    with torch.no_grad():
        assert torch.allclose(model(ids), package(ids), atol=1e-4)


def test_the_first_loss_is_that_of_guessing():
    model = small_gpt()
    loss = trainer.update(model, [padded(texts())], torch.optim.SGD(model.parameters(), lr=0.0))
    assert abs(loss - math.log(V)) < 0.3


def test_an_update_moves_the_weights_by_the_gradient():
    off = error(moved([padded(texts())]), plain_gradient(texts()))
    assert off < 1e-3


def test_gradients_are_clipped():
    norm = moved([padded(texts())], limit=0.01).norm().item()
    assert abs(norm - 0.01) < 1e-4
