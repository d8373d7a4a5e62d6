"""Processes write what one process writes, and share its memory."""

import pytest
import torch

from llmlab.course.architectures.llama import Llama
from llmlab.course.inference import generate
from llmlab.course.inference.concurrency import in_processes, processes

CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 64,
          "initializer_range": 0.4}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    return Llama.from_spec(CONFIG).eval()


def test_processes_write_the_same_tokens_from_the_same_memory(model: Llama) -> None:
    prompts = torch.randint(32, (4, 7), generator=torch.Generator().manual_seed(0))
    expected = generate(model, prompts, 12)
    assert expected.shape == (4, 19) and torch.equal(expected[:, :7], prompts)
    with processes(model, 1) as pool:
        assert torch.equal(in_processes(pool, prompts, 12), expected)
        # the same memory, not a copy: what is changed here changes what the process writes
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        changed = in_processes(pool, prompts, 12)
    assert not torch.equal(changed, expected)
    assert torch.equal(changed, generate(model, prompts, 12))
