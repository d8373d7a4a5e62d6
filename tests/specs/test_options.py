"""Options of stacks."""

import dataclasses
import pickle

import pytest

import llmlab as lab
from llmlab.specs.run import run_from_dict
from llmlab.specs.stacks import STACKS

TITAN = lab.Training(dp=8, stack="torchtitan")
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
