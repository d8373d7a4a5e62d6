"""The recorded costs of quantization are complete, and planted outliers leave a model's function alone."""

import pytest
import torch

from llmlab.course.architectures.llama import Llama
from llmlab.course.experiments.quantization import (
    CONFIG,
    FACTOR,
    GROUP,
    LENGTHS,
    METHODS,
    results,
    with_outliers,
)
from llmlab.course.quantize.algorithms.awq import awq
from llmlab.course.quantize.algorithms.rtn import layer_error, rtn
from llmlab.course.quantize.whole import inputs_of, linears


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Llama.from_spec(CONFIG).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(CONFIG["vocab_size"], (4, 64), generator=torch.Generator().manual_seed(1))


def test_three_and_four_bits_can_be_told_apart_by_every_method():
    for method in METHODS:
        added = [[r.loss for r in results() if (r.steps, r.outliers, r.method, r.group, r.bits) == (
            LENGTHS[-1], False, method, GROUP, bits)] for bits in (4, 3)]  # fmt: skip
        assert max(added[0]) < min(added[1]), method


def test_planted_outliers_change_no_output(model, ids):
    with torch.no_grad():
        assert torch.allclose(model(ids), with_outliers(model)(ids), atol=1e-4)


def test_planted_outliers_are_in_the_inputs_that_norms_feed(model, ids):
    planted, name = with_outliers(model), "layers.0.mlp.up_proj"
    before, after = (inputs_of(one, ids, linears(one))[name].abs().amax(0) for one in (model, planted))
    assert after[0] / before[0] == pytest.approx(FACTOR, rel=1e-3)
    assert after[-1] == pytest.approx(before[-1].item(), rel=1e-3)


def test_the_search_for_clipping_lowers_the_error_of_the_outputs(model, ids):
    name = "layers.1.mlp.down_proj"
    w, x = model.get_submodule(name).weight.detach(), inputs_of(model, ids, linears(model))[name]
    plain, scaled, clipped = (
        layer_error(w, q, x) for q in (rtn(w, 2, 32), awq(w, x, 2, 32), awq(w, x, 2, 32, clip=True))
    )
    assert clipped < scaled <= plain
