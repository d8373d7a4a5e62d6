"""A run's stack: what its name sets, and what it refuses by name."""

import dataclasses
import pickle
import re
from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.report import PAGED_STATES
from llmlab.specs.run import run_from_dict, stack_of
from llmlab.specs.stacks import STACKS
from llmlab.specs.stages import layers_of

TITAN = lab.Training(dp=8, stack="torchtitan")


def test_a_name_sets_what_the_stack_does_by_default():
    assert (TITAN.precision, TITAN.zero, TITAN.checkpointing) == ("mixed-bf16", 3, "selective")
    assert lab.Training(dp=8, stack=lab.Torchtitan()) == TITAN
    assert lab.Training(tp=2, dp=4, stack="torchtitan").sequence_parallel


def test_what_the_run_says_stays():
    assert lab.Training(dp=8, checkpointing="full", stack="torchtitan").checkpointing == "full"


# A stack that would set other values than a Training's default, and what else the run has.
SETTING = {
    "torchtune": ("torchtune", {}), "torchtune on 8": ("torchtune", {"dp": 8}),
    "torchtune's LoRA": ("torchtune", {"lora": lab.LoRA()}),
    "torchtitan": ("torchtitan", {}), "torchtitan on 8": ("torchtitan", {"dp": 8}),
    "torchtitan's tp": ("torchtitan", {"dp": 2, "tp": 4}),
    "litgpt": ("litgpt", {}), "litgpt on 8": ("litgpt", {"dp": 8, "accumulation": 2}),
    "megatron": ("megatron", {}), "megatron, recomputed": ("megatron:recompute=full", {}),
    "megatron's own layers": ("megatron:transformer_engine=False", {}),
    "megatron, interleaved": ("megatron:virtual_pipeline=2", {"pp": 2, "accumulation": 2}),
    "nanotron": ("nanotron", {}), "deepspeed": ("deepspeed", {}),
}  # fmt: skip
CARRIED_OUT = {("torchtune", "precision"), ("torchtune", "optimizer"), ("torchtune", "checkpointing"),
               ("torchtitan", "checkpointing")}  # fmt: skip
DEFAULTS = {field.name: field.default for field in dataclasses.fields(lab.Training)}
CHOICES = [
    (name, field, DEFAULTS[field])
    for name, (stack, given) in SETTING.items()
    for field, value in lab.Training(stack=stack, **given).values().items()
    if field != "stack" and value != given.get(field, DEFAULTS[field]) and field != "lora"
]


@pytest.mark.parametrize(("name", "field", "default"), CHOICES)
def test_a_field_that_is_given_its_default_is_a_choice(name, field, default):
    """However the run is made, it has what was given, or SpecError says what the stack has."""
    stack, given = SETTING[name]
    choice = {field: default}
    makings = (
        lambda: lab.Training(stack=stack, **given, **choice),
        lambda: replace(lab.Training(**given), stack=stack, **choice),
        lambda: replace(lab.Training(stack=stack, **given), **choice),
        lambda: replace(lab.Training(**given, **choice), stack=stack),
        lambda: run_from_dict("training", {**lab.Training(stack=stack, **given).to_dict(), **choice}),
        lambda: lab.Training(**{**vars(lab.Training(stack=stack, **given)), **choice}),
    )
    for making in makings:
        if (stack, field) in CARRIED_OUT:
            run = making()
            assert getattr(run, field) == default and field not in run.unset
            assert f"{field}={default!r}" in repr(run)
            for same in (run_from_dict("training", run.to_dict()), pickle.loads(pickle.dumps(run)), replace(run)):
                assert same == run and field not in same.unset
        else:
            with pytest.raises(lab.SpecError, match=f"{field}={default!r}"):
                making()


def test_every_field_that_a_stack_sets_is_among_them():
    assert {field for _, field, _ in CHOICES} == {
        "precision", "optimizer", "checkpointing", "attention", "zero", "sequence_parallel", "virtual_stages",
        "sync_each_batch",
    }  # fmt: skip


def test_what_nobody_gives_follows_the_stack_and_the_degrees():
    run = lab.Training(stack="torchtune", seq_len=512)
    assert run.optimizer == "adamw-8bit" and "optimizer" in run.unset and "seq_len" not in run.unset
    assert replace(run, dp=8) == lab.Training(stack="torchtune", seq_len=512, dp=8)
    assert replace(run, stack="torchtitan") == lab.Training(stack="torchtitan", seq_len=512)
    assert replace(run, stack="transformers").optimizer == run.optimizer  # transformers sets nothing
    assert lab.Training(2, 512).unset == lab.Training(micro_batch=2, seq_len=512).unset


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


@pytest.mark.parametrize("stack", ["torchtune", "litgpt", "megatron"])
def test_adapters_in_fp32_are_refused_where_a_stack_has_half_ones(stack):
    run = lab.Training(stack=stack, lora=lab.LoRA(8))
    assert run.lora.autocast_adapter_dtype is False
    assert run_from_dict("training", run.to_dict()) == run
    assert replace(run, stack="transformers", precision="bf16").lora == lab.LoRA(8)
    with pytest.raises(lab.SpecError, match=f"autocast_adapter_dtype=True with stack='{stack}'"):
        lab.Training(stack=stack, lora=lab.LoRA(8, autocast_adapter_dtype=True))


def test_options_as_text_are_those_of_the_class():
    assert lab.Training(dp=8, stack="torchtitan:ac=selective_layers,every=3").stack == lab.Torchtitan(
        ac="selective_layers", every=3
    )


def test_transformers_is_the_default_and_changes_nothing():
    assert lab.Training(stack="transformers") == lab.Training()
    assert "stack" not in lab.Training().to_dict()


def test_transformers_is_a_stack_without_options_for_whoever_asks_for_facts():
    run = lab.Training(zero=3, dp=2)
    assert run.stack == "transformers" == stack_of(run).name and repr(run) == "Training(zero=3, dp=2)"
    assert stack_of(run) == stack_of(lab.Inference()) and not stack_of(run).values() and not stack_of(run).own_program
    assert stack_of(TITAN) is TITAN.stack and TITAN.stack.own_model and not stack_of(run).own_model


@pytest.mark.parametrize("name", STACKS)
def test_an_option_has_no_value_but_those_of_its_type(name):
    options = {f.name: f.type for f in dataclasses.fields(STACKS[name])}
    for option in (option for option, kind in options.items() if "bool" in kind or kind[0].isupper()):
        with pytest.raises(lab.SpecError, match=f"^{option}='nothing' is not one of"):
            STACKS[name](**{option: "nothing"})


@pytest.mark.parametrize("run", [TITAN, lab.Training(dp=8, stack=lab.Torchtitan(ac="none"))])
def test_a_run_survives_json_pickle_and_replace(run):
    assert run_from_dict("training", run.to_dict()) == run
    assert pickle.loads(pickle.dumps(run)) == run
    assert dataclasses.replace(run) == run
    report = lab.estimate("meta-llama/Meta-Llama-3-8B", run, "H100-80GB")
    assert lab.Report.from_json(report.to_json()) == report


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


@pytest.mark.parametrize("asked", STACKS.values(), ids=list(STACKS))
@pytest.mark.parametrize("other", STACKS.values(), ids=list(STACKS))
def test_every_option_of_another_stack_is_refused_by_name(asked, other):
    own = {each.name for each in dataclasses.fields(asked)}
    for option in dataclasses.fields(other):
        if option.name in own or option.name in asked.unsupported_options:
            continue
        owners = [name for name, each in STACKS.items() if option.name in {f.name for f in dataclasses.fields(each)}]
        with pytest.raises(lab.SpecError) as error:
            asked(**{option.name: option.default})
        words = f"{asked.name} has no option {option.name}: it is an option of {' and '.join(owners)}"
        assert words in str(error.value)


@pytest.mark.parametrize("option", lab.Torchtitan.unsupported_options)
def test_what_torchtitan_has_and_is_not_described_is_said(option):
    with pytest.raises(lab.SpecError, match=f"torchtitan's {option} is not supported here: .{{20}}"):
        lab.Torchtitan(**{option: True})


def test_a_stack_without_stages_is_not_offered_for_their_order():
    with pytest.raises(lab.SpecError, match="stack='transformers' or 'torchtitan' has; with") as error:
        lab.Training(dp=2, pp=2, accumulation=4, schedule="gpipe", stack="megatron")
    assert "torchtune" not in str(error.value)


def test_torchtitans_pipelines_keep_weights_and_compute_in_fp32_where_nothing_is_sharded():
    """reshard_after_forward's default is not to, in a pipeline (apply_fsdp), and maybe_enable_amp has no autocast."""
    pipeline = {"pp": 4, "accumulation": 4, "stack": "torchtitan"}
    assert lab.Training(dp=2, **pipeline).zero == 2 and lab.Training(dp=2, stack="torchtitan").zero == 3
    assert lab.Training(dp=2, **{**pipeline, "stack": "torchtitan:reshard_after_forward=always"}).zero == 3
    assert (lab.Training(**pipeline).precision, lab.Training(dp=2, **pipeline).precision) == ("fp32", "mixed-bf16")


@pytest.mark.parametrize(("given", "own"), [
    ({"tp": 2, "precision": "mixed-bf16"}, "fp32"), ({"dp": 2, "precision": "autocast-bf16"}, "mixed-bf16"),
    ({"precision": "mixed-bf16"}, "autocast-bf16"),
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


def test_ranks_of_context_parallelism_share_states():
    alone = lab.Training(cp=8, seq_len=8192, stack="torchtitan")
    assert (alone.zero, alone.precision) == (3, "mixed-bf16")
    runs = [lab.Training(cp=ranks, seq_len=8192, stack="torchtitan") for ranks in (2, 8)]
    first, second = (lab.estimate("meta-llama/Meta-Llama-3-8B", run, "H100-80GB").parts["optimizer"] for run in runs)
    assert first == pytest.approx(4 * second, rel=1e-3)


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


def test_torchao_quantizes_whole_blocks_of_scales():
    """SmolLM2-360M's queries are 960 × 960: 56 blocks of 64 × 256 weights, and a quarter of one."""
    run = lab.Training(lora=lab.LoRA(), quantization="nf4", stack="torchtune")
    with pytest.raises(lab.SpecError, match=r"q_proj of .*SmolLM2-360M is 960 × 960, 4096 more than .* 16384 elements"):
        lab.estimate("HuggingFaceTB/SmolLM2-360M", run, "A100-80GB")
    assert lab.estimate("TinyLlama/TinyLlama-1.1B-Chat-v1.0", run, "A100-80GB").peak_allocated


def test_litgpts_recipes_follow_the_devices():
    alone, several = lab.Training(stack="litgpt"), lab.Training(dp=8, stack="litgpt")
    assert (alone.precision, alone.zero, alone.checkpointing) == ("bf16", 0, None)
    assert (several.precision, several.zero, several.checkpointing) == ("bf16", 3, "full")
    assert several.sync_each_batch and not lab.Training(dp=8, accumulation=2, stack="litgpt").sync_each_batch
    assert lab.Training(accumulation=2, stack="litgpt").sync_each_batch  # one device reduces nothing


OFFLOADED = {"zero": 3, "offload": "optimizer", "stack": lab.DeepSpeed(sub_group_size=1e8, overlap_comm=False)}
SUMMED = {"zero": 2, "stack": lab.DeepSpeed(grad_accum_dtype="fp32")}
AT_ONCE = {"zero": 1, "stack": lab.DeepSpeed(grad_accum_dtype="fp32", immediate_grad_update=True)}


@pytest.mark.parametrize("given", [{"zero": 1}, OFFLOADED, SUMMED, AT_ONCE])
def test_deepspeeds_settings_there_and_back(given):
    run = lab.Training(**{"dp": 8, "micro_batch": 2, "stack": "deepspeed", **given})
    settings = run.to_deepspeed()
    assert lab.Training.from_deepspeed(settings, dp=8, stack="deepspeed") == run
    options = settings["zero_optimization"]
    assert ("sub_group_size" in options) == (given is OFFLOADED)


def test_deepspeeds_buckets_are_read_for_its_stack_alone():
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}}
    assert lab.Training.from_deepspeed(settings, dp=8).stack == "transformers"
    assert lab.Training.from_deepspeed(settings, dp=8, stack="deepspeed").stack.reduce_bucket_size == 200_000_000
    with pytest.raises(lab.SpecError, match="enable bf16"):
        lab.Training.from_deepspeed({"zero_optimization": {"stage": 2}}, dp=8, stack="deepspeed")
    with pytest.raises(lab.SpecError, match="data_types"):
        lab.Training.from_deepspeed({"data_types": {"grad_accum_dtype": "fp32"}}, dp=8)


def test_deepspeed_runs_a_stage_of_zero_on_one_gpu_and_no_other_stack_does():
    assert lab.Training(zero=3, stack="deepspeed").dp == 1
    with pytest.raises(lab.SpecError, match=r"zero=3 .*dp=1"):
        lab.Training(zero=3)


def test_an_option_that_no_stack_has():
    with pytest.raises(lab.SpecError, match=r"torchtitan has no option acc: no stack has it; torchtitan has ac"):
        lab.Torchtitan(acc="full")


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


def test_torchtune_adapts_attention_too():
    run = lab.Training(seq_len=64, stack="torchtune", lora=lab.LoRA(8, ("gate_proj", "down_proj")))
    with pytest.raises(lab.SpecError, match="add one of q_proj, k_proj, v_proj, o_proj"):
        lab.estimate("meta-llama/Llama-3.2-1B", run, "H200")
    assert lab.estimate("meta-llama/Llama-3.2-1B", replace(run, lora=lab.LoRA(8, ("o_proj", "gate_proj"))), "H200")
