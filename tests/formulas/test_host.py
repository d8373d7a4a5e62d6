"""The CPU's operators of FSDP2 and of an update with master weights, counted from the simulator's log."""

from collections import Counter
from functools import cache

import pytest

import llmlab as lab
from llmlab.formulas.time.host import Operators, _fsdp_operators
from llmlab.simulation.report import recorded

GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 128}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
         "max_position_embeddings": 128}  # fmt: skip


@cache
def operators(family, **options):
    spec = lab.model({"gpt2": GPT2, "llama": LLAMA}[family])
    run = lab.Training(micro_batch=1, seq_len=64, precision="mixed-bf16", optimizer="sgd", **options)
    return recorded(spec, run, lab.gpu("H100")).operators


def counted(family, **options):
    """Kernels and views of the passes, forward and backward."""
    passes = [one for one in operators(family, **options) if one.phase != "optimizer"]
    counts = Counter((one.kind == "none", one.backward) for one in passes)
    return Operators(*(counts[key] for key in ((False, False), (True, False), (False, True), (True, True))))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("zero", [2, 3])
def test_fsdp2_adds_operators_for_each_unit_and_each_parameter(family, zero):
    spec = lab.model({"gpt2": GPT2, "llama": LLAMA}[family])
    more = counted(family, dp=8, zero=zero).plus(counted(family).times(-1))
    formula = _fsdp_operators(spec, lab.Training(precision="mixed-bf16", dp=8, zero=zero))
    assert (formula.kernels, formula.kernels_back) == (more.kernels, more.kernels_back)
    assert formula.views == pytest.approx(more.views, rel=0.1)
    assert formula.views_back == pytest.approx(more.views_back, rel=0.1)
