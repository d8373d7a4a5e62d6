"""What torchtune runs."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.report import PAGED_STATES


@pytest.mark.parametrize(("given", "bytes_of_parameter"), [
    ({}, 2), ({"optimizer": "adamw"}, 8), ({"optimizer": "adamw", "precision": "fp32"}, 16),
    ({"stack": "torchtune:optimizer=AdamW,optimizer_in_bwd=False"}, 8),
    ({"optimizer": "adamw", "stack": "torchtune:optimizer_in_bwd=True"}, 6),
])  # fmt: skip
def test_adamw_that_is_asked_of_torchtune_has_its_states_on_the_card(given, bytes_of_parameter):
    """Weights, gradients unless each is gone in backward, and two states: 54 GB of a Llama 2 7B in bf16
    (pytorch/torchtune, pull request 389); states of PagedAdamW8bit are the driver's. One run is not another's cache."""
    spec = lab.model("meta-llama/Llama-2-7b-hf")
    for options in ({"stack": "torchtune"}, {"stack": "torchtune", **given}):
        run = lab.Training(**{"seq_len": 512, **options})
        report = lab.estimate(spec, run, "A100-80GB")
    assert report.peak_allocated == pytest.approx(bytes_of_parameter * spec.parameters, rel=0.1)
    assert (PAGED_STATES in report.notes) == (run.optimizer == "adamw-8bit")


def test_torchtunes_recipe_follows_the_run():
    full = lab.Training(stack="torchtune")
    assert (full.precision, full.optimizer, full.checkpointing) == ("bf16", "adamw-8bit", "full")
    assert full.stack.paged(full) and full.stack.steps_in_backward(full)
    several = lab.Training(dp=8, stack="torchtune")
    assert (several.optimizer, several.zero) == ("adamw", 3)
    assert not several.stack.steps_in_backward(several)
    accumulated = lab.Training(accumulation=2, stack="torchtune")
    assert not accumulated.stack.steps_in_backward(accumulated)
    lora = lab.LoRA(rank=8, targets=("q_proj",))
    assert lab.Training(lora=lora, stack="torchtune").checkpointing == "full"
    assert lab.Training(lora=lora, dp=8, stack="torchtune").checkpointing is None


def test_torchtune_adapts_attention_too():
    run = lab.Training(seq_len=64, stack="torchtune", lora=lab.LoRA(8, ("gate_proj", "down_proj")))
    with pytest.raises(lab.SpecError, match="add one of q_proj, k_proj, v_proj, o_proj"):
        lab.estimate("meta-llama/Llama-3.2-1B", run, "H200")
    assert lab.estimate("meta-llama/Llama-3.2-1B", replace(run, lora=lab.LoRA(8, ("o_proj", "gate_proj"))), "H200")
