"""A step's seconds by part, and one layer's."""

import pytest

import llmlab as lab


@pytest.mark.parametrize(("checkpointing", "least", "most"), [(None, 1.95, 2.1), ("full", 2.6, 3)])
def test_a_layers_backward_is_two_forwards_and_with_recomputation_almost_three(checkpointing, least, most):
    """Recomputation stops before the block's last product. The layers share equally what the blocks compute."""
    run = lab.Training(micro_batch=4, seq_len=1024, precision="bf16", checkpointing=checkpointing)
    report = lab.estimate("Llama-3.1-8B", run, "H100")
    layer = report.layer_time
    assert least < layer["backward"] / layer["forward"] < most
    computed = sum(report.time[part] for part in ("products", "attention", "elementwise"))
    assert 32 * (layer["forward"] + layer["backward"]) == pytest.approx(computed)
