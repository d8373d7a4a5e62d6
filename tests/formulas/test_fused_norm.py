"""kernels="fused-norm": RMSNorm is one operator, which keeps its input alone."""

from dataclasses import replace

import pytest
import torch

import llmlab as lab
from llmlab.step.model import build_model

LLAMA = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 2048,
         "rms_norm_eps": 1e-3}  # fmt: skip


@pytest.mark.parametrize("fields", ({"precision": "bf16"}, {"precision": "autocast-bf16"}), ids=("half", "autocast"))
def test_a_block_keeps_less_as_the_simulator_finds(fields):
    run = lab.Training(micro_batch=2, seq_len=1024, kernels="fused-norm", **fields)
    reports = [verb(LLAMA, each, "A100") for each in (run, replace(run, kernels=None))
               for verb in (lab.estimate, lab.simulate)]  # fmt: skip
    fused, simulated, usual, _ = (report.peak_allocated for report in reports)
    assert fused == pytest.approx(simulated, rel=0.02)
    assert fused < 0.95 * usual


def test_the_model_computes_what_transformers_own_norms_do():
    run = lab.Training(seq_len=32, kernels="fused-norm")
    tokens = torch.arange(32).unsqueeze(0)
    losses = []
    for each in (run, replace(run, kernels=None)):
        torch.manual_seed(0)
        losses.append(build_model(lab.model(LLAMA), each, "cpu")(input_ids=tokens, labels=tokens).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_model_without_such_norms_is_an_error():
    run = lab.Training(seq_len=32, kernels="fused-norm")
    with pytest.raises(lab.NotAvailable, match="no RMSNorm"):
        build_model(lab.model("gpt2"), run, "meta")
