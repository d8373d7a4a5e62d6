"""Stage 9, Fused kernels and Writing kernels: the loss never holds all logits."""

import pytest
import torch
from helpers import V, error, moved, padded, plain_gradient, texts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from yours import kernels, trainer

from llmlab.notebook.exercises import kernels as kernel_facts
from llmlab.notebook.exercises import trainer as facts
from llmlab.notebook.quiz import broken


class MostRows(TorchDispatchMode):
    """The most rows of V values in any tensor that an operator returns."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [t.numel() // V for t in tree_leaves(result) if torch.is_tensor(t) and t.shape[-1:] == (V,)]
        self.rows = max(self.rows, *sizes, 0)
        return result


def test_fused_loss():
    assert broken(trainer.fused_loss, facts.fused_loss) == {}


def test_largest_chunk():
    assert broken(trainer.largest_chunk, facts.largest_chunk) == {}


@pytest.mark.skipif(not kernel_facts.add_and_norm, reason="Triton is not installed")
def test_add_and_norm():
    assert broken(kernels.add_and_norm, kernel_facts.add_and_norm) == {}


def test_logsumexp_by_lanes():
    assert broken(kernels.logsumexp_by_lanes, kernel_facts.logsumexp_by_lanes) == {}


def test_a_loss_in_chunks_has_the_same_gradients_and_few_logits():
    with MostRows() as most:
        chunked = moved([padded(texts())], chunk=64)
    off = error(chunked, plain_gradient(texts()))
    assert off < 1e-3
    assert most.rows <= 64


def test_bytes_loaded():
    assert broken(kernels.bytes_loaded, kernel_facts.bytes_loaded) == {}


def test_sectors():
    assert broken(kernels.sectors, kernel_facts.sectors) == {}
