"""Options of stacks."""

import dataclasses
import pickle
from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.specs.run import run_from_dict
from llmlab.specs.stacks import STACKS

TITAN = lab.Training(dp=8, stack="torchtitan")
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


def test_options_as_text_are_those_of_the_class():
    assert lab.Training(dp=8, stack="torchtitan:ac=selective_layers,every=3").stack == lab.Torchtitan(
        ac="selective_layers", every=3
    )


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


def test_an_option_that_no_stack_has():
    with pytest.raises(lab.SpecError, match=r"torchtitan has no option acc: no stack has it; torchtitan has ac"):
        lab.Torchtitan(acc="full")


def test_every_field_that_a_stack_sets_is_among_them():
    assert {field for _, field, _ in CHOICES} == {
        "precision", "optimizer", "checkpointing", "attention", "zero", "sequence_parallel", "virtual_stages",
        "sync_each_batch",
    }  # fmt: skip
