"""What all specs share: their checks, their text and their JSON."""

import dataclasses
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from llmlab.specs.run import PRECISIONS, run_from_dict


def test_specs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        lab.Training().micro_batch = 2


def test_only_what_differs_is_shown():
    assert repr(lab.Training(seq_len=1024, micro_batch=2)) == "Training(micro_batch=2)"


lora = st.none() | st.builds(lab.LoRA, rank=st.integers(1, 64), targets=st.just(("q_proj", "o_proj")))
specs = st.builds(
    lab.Training, micro_batch=st.integers(1, 99), precision=st.sampled_from(PRECISIONS), lora=lora, dp=st.integers(1, 9)
) | st.builds(lab.Inference, batch=st.integers(1, 99), kv=st.sampled_from(["bf16", "int8"]))


@given(specs)
def test_a_spec_survives_the_way_through_a_dict(spec):
    kind = "training" if isinstance(spec, lab.Training) else "inference"
    assert run_from_dict(kind, spec.to_dict()) == spec

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
