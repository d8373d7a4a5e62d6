"""A run's stack: what its name sets, and what it refuses by name."""

import dataclasses
import re
from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.specs.run import run_from_dict, stack_of

TITAN = lab.Training(dp=8, stack="torchtitan")


def test_a_name_sets_what_the_stack_does_by_default():
    assert (TITAN.precision, TITAN.zero, TITAN.checkpointing) == ("mixed-bf16", 3, "selective")
    assert lab.Training(dp=8, stack=lab.Torchtitan()) == TITAN
    assert lab.Training(tp=2, dp=4, stack="torchtitan").sequence_parallel


def test_what_the_run_says_stays():
    assert lab.Training(dp=8, checkpointing="full", stack="torchtitan").checkpointing == "full"


def test_what_nobody_gives_follows_the_stack_and_the_degrees():
    run = lab.Training(stack="torchtune", seq_len=512)
    assert run.optimizer == "adamw-8bit" and "optimizer" in run.unset and "seq_len" not in run.unset
    assert replace(run, dp=8) == lab.Training(stack="torchtune", seq_len=512, dp=8)
    assert replace(run, stack="torchtitan") == lab.Training(stack="torchtitan", seq_len=512)
    assert replace(run, stack="transformers").optimizer == run.optimizer  # transformers sets nothing
    assert lab.Training(2, 512).unset == lab.Training(micro_batch=2, seq_len=512).unset


@pytest.mark.parametrize("stack", ["torchtune", "litgpt", "megatron"])
def test_adapters_in_fp32_are_refused_where_a_stack_has_half_ones(stack):
    run = lab.Training(stack=stack, lora=lab.LoRA(8))
    assert run.lora.autocast_adapter_dtype is False
    assert run_from_dict("training", run.to_dict()) == run
    assert replace(run, stack="transformers", precision="bf16").lora == lab.LoRA(8)
    with pytest.raises(lab.SpecError, match=f"autocast_adapter_dtype=True with stack='{stack}'"):
        lab.Training(stack=stack, lora=lab.LoRA(8, autocast_adapter_dtype=True))


def test_transformers_is_the_default_and_changes_nothing():
    assert lab.Training(stack="transformers") == lab.Training()
    assert "stack" not in lab.Training().to_dict()


def test_transformers_is_a_stack_without_options_for_whoever_asks_for_facts():
    run = lab.Training(zero=3, dp=2)
    assert run.stack == "transformers" == stack_of(run).name and repr(run) == "Training(zero=3, dp=2)"
    assert stack_of(run) == stack_of(lab.Inference()) and not stack_of(run).values() and not stack_of(run).own_program
    assert stack_of(TITAN) is TITAN.stack and TITAN.stack.own_model and not stack_of(run).own_model


@pytest.mark.parametrize("stack, given, names", [
    ("torchtitan", {"kernels": "liger"}, ("torchtitan has no kernels='liger'", "'transformers' has")),
    ("torchtitan", {"optimizer": "lion"}, ("torchtitan has no optimizer='lion'", "give optimizer='adamw'")),
    ("torchtitan", {"optimizer": "adamw-fused"}, ("torchtitan has no optimizer='adamw-fused'", "own options say")),
    ("torchtitan", {"zero": 2}, ("zero=2", "reshard_after_forward='default'")),
    ("torchtitan", {"stack": "torchtitan:ac=ful"}, ("ac='ful'", "selective_op")),
    ("torchtitan", {"stack": "torchtitan:ac"}, ("torchtitan:ac=full",)),
    ("torchtitan", {"stack": "torchtune2"}, ("torchtune2", "transformers")),
    ("torchtitan", {"stack": 3}, ("stack=3", "int")),
    ("torchtune", {"tp": 2}, ("torchtune has no tp=2", "'torchtitan'")),
    ("torchtune", {"checkpointing": "selective"}, ("torchtune has no checkpointing='selective'", "'megatron'")),
    ("torchtune", {"optimizer": "adamw-8bit", "stack": "torchtune:optimizer=AdamW"}, ("'adamw-8bit'", "'AdamW'")),
    ("torchtune", {"accumulation": 2, "stack": "torchtune:optimizer_in_bwd=True"}, ("in_bwd=True", "accumulation=2")),
    ("torchtune", {"stack": "torchtune:ac=full"}, ("torchtune has no option ac", "it is an option of torchtitan")),
    (
        "torchtune", {"stack": lab.Torchtune(enable_activation_checkpointing=False, enable_activation_offloading=True)},
        ("enable_activation_offloading=True", "enable_activation_checkpointing"),
    ),
    ("litgpt", {"tp": 2}, ("litgpt has no tp=2", "'torchtitan'")),
    ("litgpt", {"precision": "autocast-bf16"}, ("precision='autocast-bf16'", "not supported", "'bf16'")),
    ("litgpt", {"quantization": "nf4", "lora": lab.LoRA()}, ("quantization='nf4'", "not supported")),
    ("litgpt", {"checkpointing": "full"}, ("checkpointing='full'", "dp=1", "checkpointing=None")),
    ("litgpt", {"lora": lab.LoRA(targets=("q_proj", "up_proj"))}, ("up_proj", "lora_mlp")),
    ("litgpt", {"stack": "litgpt:ac=full"}, ("litgpt has no option ac", "it is an option of torchtitan")),
    ("deepspeed", {"tp": 2}, ("tp=2 with stack='deepspeed'", "megatron:deepspeed=true", "give tp=1")),
    ("deepspeed", {"lora": lab.LoRA()}, ("deepspeed has no lora", "'torchtune'", "give lora=none")),
    ("deepspeed", {"precision": "bf16"}, ("deepspeed has no precision='bf16'", "'torchtune'", "mixed-bf16")),
    ("deepspeed", {"stack": "deepspeed:ac=full"}, ("deepspeed has no option ac", "it is an option of torchtitan")),
    ("deepspeed", {"stack": "deepspeed:reduce_bucket_size=0"}, ("reduce_bucket_size=0", ">= 1")),
    ("deepspeed", {"stack": "deepspeed:grad_accum_dtype=fp16"}, ("grad_accum_dtype='fp16'", "mixed-bf16")),
    ("deepspeed", {"zero": 2, "stack": "deepspeed:immediate_grad_update=true"}, ("update=True", "zero=1")),
    ("deepspeed", {"stack": "deepspeed:torch_adam=true"}, ("torch_adam=True", "zero >= 1")),
])  # fmt: skip
def test_what_a_stack_has_not_is_refused_by_name(stack, given, names):
    dp = 8 if stack in ("torchtitan", "deepspeed") else 1
    with pytest.raises((lab.SpecError, lab.UnknownName)) as error:
        lab.Training(**{"dp": dp, "stack": stack, **given})
    assert all(name in str(error.value) for name in names)


def test_a_stack_without_stages_is_not_offered_for_their_order():
    with pytest.raises(lab.SpecError, match="stack='transformers' or 'torchtitan' has; with") as error:
        lab.Training(dp=2, pp=2, accumulation=4, schedule="gpipe", stack="megatron")
    assert "torchtune" not in str(error.value)


def test_ranks_of_context_parallelism_share_states():
    alone = lab.Training(cp=8, seq_len=8192, stack="torchtitan")
    assert (alone.zero, alone.precision) == (3, "mixed-bf16")
    runs = [lab.Training(cp=ranks, seq_len=8192, stack="torchtitan") for ranks in (2, 8)]
    first, second = (lab.estimate("meta-llama/Meta-Llama-3-8B", run, "H100-80GB").parts["optimizer"] for run in runs)
    assert first == pytest.approx(4 * second, rel=1e-3)


def test_torchao_quantizes_whole_blocks_of_scales():
    """SmolLM2-360M's queries are 960 × 960: 56 blocks of 64 × 256 weights, and a quarter of one."""
    run = lab.Training(lora=lab.LoRA(), quantization="nf4", stack="torchtune")
    with pytest.raises(lab.SpecError, match=r"q_proj of .*SmolLM2-360M is 960 × 960, 4096 more than .* 16384 elements"):
        lab.estimate("HuggingFaceTB/SmolLM2-360M", run, "A100-80GB")
    assert lab.estimate("TinyLlama/TinyLlama-1.1B-Chat-v1.0", run, "A100-80GB").peak_allocated


def test_a_model_that_the_stack_has_no_code_for():
    with pytest.raises(lab.SpecError, match=r"torchtitan.* supports llama, qwen3, qwen3_moe here, not gpt2"):
        lab.estimate("gpt2", lab.Training(stack="torchtitan"), "H100-80GB")


def test_stacks_side_by_side():
    run = lab.Training(seq_len=2048, dp=8, zero=3, precision="mixed-bf16", checkpointing="full")
    both = lab.Comparison(
        tuple(
            lab.estimate("meta-llama/Meta-Llama-3-8B", dataclasses.replace(run, stack=stack), "H100-80GB")
            for stack in ("transformers", "torchtitan")
        )
    )
    assert both.names == ["transformers", "torchtitan"]
    assert both.table()[0] == ("", "estimated, transformers", "estimated, torchtitan")
    first, second = (report.peak_allocated for report in both.reports)
    assert second < first
    assert re.match(r"torchtitan needs [\d.,]+ [GM]iB less than transformers: ", both.explain()[0])


def test_stacks_are_compared_by_predictions_alone():
    with pytest.raises(lab.SpecError, match="training step"):
        lab.compare("gpt2", lab.Inference(), "H100-80GB", stacks=("transformers", "torchtitan"))


def test_embedding_and_head_count_as_layers_where_the_end_stages_are_shorter():
    """Llama 3.1 405B has 126 layers: 16 stages of 8, but the first and the last of 7 (arXiv 2407.21783, 3.3.2)."""
    spec = lab.model("meta-llama/Llama-3.1-405B")
    run = lab.Training(seq_len=8192, precision="mixed-bf16", tp=8, pp=16, accumulation=16)
    for virtual, fits in ((8, True), (4, True), (3, False)):
        stack = lab.Megatron(virtual_pipeline=virtual)
        if fits:
            assert dataclasses.replace(run, stack=stack).virtual_stages == virtual
            lab.estimate(spec, dataclasses.replace(run, stack=stack), "H100")
        else:
            with pytest.raises(lab.SpecError, match="virtual_pipeline=3 does not divide"):
                lab.estimate(spec, dataclasses.replace(run, stack=stack), "H100")
