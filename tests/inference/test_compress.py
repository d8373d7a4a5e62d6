"""Pruning is torch's, low rank is the nearest, and neither touches the model it is given."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as theirs

from llmlab.architectures.llama import Llama
from llmlab.base.errors import SpecError
from llmlab.inference.compress import low_rank, low_rank_share, prune, prune_2_of_4, sparse_bytes

CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    return Llama.from_spec(CONFIG).eval()


def linears(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.layers.modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9])
def test_magnitude_pruning_is_torchs(model: Llama, share: float) -> None:
    for ours, original in zip(linears(prune(model, share)), linears(model), strict=True):
        expected = nn.Linear(original.in_features, original.out_features, bias=False)
        expected.weight.data = original.weight.data.clone()
        theirs.l1_unstructured(expected, "weight", share)
        assert torch.equal(ours.weight, expected.weight)


def test_two_of_four_is_the_pattern_that_sparse_tensor_cores_take(model: Llama) -> None:
    from torch.sparse import SparseSemiStructuredTensor  # its checks need no GPU; its products do

    assert SparseSemiStructuredTensor is not None
    for ours, original in zip(linears(prune_2_of_4(model)), linears(model), strict=True):
        fours, all_fours = (m.weight.unflatten(1, (-1, 4)) for m in (ours, original))
        assert ((fours != 0).sum(-1) == 2).all()
        left_out = torch.where(fours == 0, all_fours.abs(), 0).amax(-1)
        kept = torch.where(fours != 0, all_fours.abs(), torch.inf).amin(-1)
        assert (kept >= left_out).all()


def test_low_rank_is_the_nearest_matrix_of_that_rank(model: Llama) -> None:
    """Eckart and Young: what is lost is the sum of the squares of the singular values left out."""
    original = model.layers[0].mlp.gate_proj.weight
    ours = low_rank(model, 8).layers[0].mlp.gate_proj
    product = ours[1].weight @ ours[0].weight
    lost = torch.linalg.svdvals(original)[8:].square().sum()
    assert torch.linalg.matrix_rank(product) == 8
    assert (original - product).square().sum().item() == pytest.approx(lost.item(), rel=1e-4)
    x = torch.randn(3, 32)
    assert torch.allclose(ours(x), x @ product.T, atol=1e-5)


def test_a_layer_that_would_get_no_smaller_stays_and_the_model_is_not_changed(model: Llama) -> None:
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids)
    assert isinstance(low_rank(model, 16).layers[0].self_attn.q_proj, nn.Linear)  # 16 · (32 + 32) = 32 · 32
    assert isinstance(low_rank(model, 16).layers[0].mlp.up_proj, nn.Sequential)
    prune(model, 0.9), prune_2_of_4(model)
    assert torch.equal(model(ids), before)
    assert sum(p.numel() for p in low_rank(model, 4).parameters()) < sum(p.numel() for p in model.parameters())


def test_zeros_save_bytes_only_in_a_format_that_leaves_them_out() -> None:
    assert sparse_bytes(1000, 0.5) == {"dense": 2000, "list": 2000, "mask": 1125, "2:4": 1125}
    assert sparse_bytes(1000, 0.3)["list"] > 2000
    assert low_rank_share(4096, 14336, 4096 * 14336 // (4096 + 14336)) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("call", [lambda m: prune(m, 1.0), lambda m: prune(m, -0.1), lambda m: low_rank(m, 0)])
def test_what_leaves_nothing_is_refused(model: Llama, call) -> None:
    with pytest.raises(SpecError, match="give"):
        call(model)
