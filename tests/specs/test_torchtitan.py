"""What torchtitan runs."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.specs.stages import layers_of


@pytest.mark.parametrize("option", lab.Torchtitan.unsupported_options)
def test_what_torchtitan_has_and_is_not_described_is_said(option):
    with pytest.raises(lab.SpecError, match=f"torchtitan's {option} is not supported here: .{{20}}"):
        lab.Torchtitan(**{option: True})


def test_torchtitans_pipelines_keep_weights_and_compute_in_fp32_where_nothing_is_sharded():
    """reshard_after_forward's default is not to, in a pipeline (apply_fsdp), and maybe_enable_amp has no autocast."""
    pipeline = {"pp": 4, "accumulation": 4, "stack": "torchtitan"}
    assert lab.Training(dp=2, **pipeline).zero == 2 and lab.Training(dp=2, stack="torchtitan").zero == 3
    assert lab.Training(dp=2, **{**pipeline, "stack": "torchtitan:reshard_after_forward=always"}).zero == 3
    assert (lab.Training(**pipeline).precision, lab.Training(dp=2, **pipeline).precision) == ("fp32", "mixed-bf16")


@pytest.mark.parametrize(("given", "own"), [
    ({"tp": 2, "precision": "mixed-bf16"}, "fp32"), ({"dp": 2, "precision": "autocast-bf16"}, "mixed-bf16"),
    ({"precision": "mixed-bf16"}, "autocast-bf16"),
    ({"tp": 2, "pp": 2, "accumulation": 2, "precision": "autocast-bf16"}, "fp32"),
])  # fmt: skip
def test_torchtitan_has_one_precision_for_each_set_of_degrees(given, own):
    with pytest.raises(lab.SpecError, match=f"precision='{given['precision']}' with dp=.* give precision='{own}'"):
        lab.Training(stack="torchtitan", **given)
    assert lab.Training(stack="torchtitan", **{**given, "precision": own}).precision == own


def test_torchtitans_llama_has_heads_of_hidden_over_heads():
    config = {**lab.model("meta-llama/Meta-Llama-3-8B").config, "head_dim": 64}
    with pytest.raises(lab.SpecError, match=r"head_dim=64 with .* hidden / heads = 128"):
        lab.estimate(config, lab.Training(dp=8, stack="torchtitan"), "H100-80GB")


@pytest.mark.parametrize("model", ["meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-8B"])
def test_torchtitans_ranks_have_whole_key_value_heads(model):
    """Of 4 over 8 ranks each has half a one, which it views as one of head_dim elements, and stops."""
    few = {**lab.model(model).config, "num_key_value_heads": 4}
    with pytest.raises(lab.SpecError, match=r"tp=8 with .* whole key/value heads, and the model has 4 "):
        lab.estimate(few, lab.Training(dp=2, tp=8, stack="torchtitan"), "H100-80GB")
    assert lab.estimate(few, lab.Training(dp=2, tp=4, stack="torchtitan"), "H100-80GB").peak_allocated


@pytest.mark.parametrize(("model", "given", "message"), [
    ("meta-llama/Meta-Llama-3-8B", {"accumulation": 3}, "accumulation=3 with pp=4: torch's 1F1B takes"),
    ("Qwen/Qwen3-8B", {"accumulation": 4}, "torchtitan has no pipeline for qwen3"),
])  # fmt: skip
def test_pipelines_that_torchtitan_has_not_are_refused(model, given, message):
    with pytest.raises(lab.SpecError, match=message):
        lab.estimate(model, lab.Training(dp=2, pp=4, stack="torchtitan", **given), "H100-80GB")


def test_torchtitan_counts_embedding_and_head_as_layers_where_stages_could_be_equal():
    """8 layers over 4 ranks, as generate_llm_fqn_per_model_part deals them out; interleaved, over 8 virtual stages."""
    spec = lab.model({**lab.model("meta-llama/Meta-Llama-3-8B").config, "num_hidden_layers": 8})
    run = lab.Training(dp=2, pp=4, accumulation=8, stack="torchtitan")
    assert layers_of(spec, run) == (2, 3, 2, 1)
    assert layers_of(spec, replace(run, virtual_stages=2)) == (1 + 1, 2 + 1, 1 + 1, 1 + 0)
    assert layers_of(spec, lab.Training(pp=4, accumulation=8, stack="megatron")) == (2, 2, 2, 2)
