"""The runs that a plan compares."""

from math import prod

import pytest

import llmlab as lab
from llmlab.planning.machines import machines
from llmlab.planning.space import Question, divisors, shapes

SPEC = lab.model("meta-llama/Llama-3.1-8B")


def test_a_field_has_its_fixed_value_or_those_that_the_stack_supports():
    question = Question(SPEC, 8, fixed={"tp": 2}, stack=lab.Torchtune())
    assert question.options("tp", (1, 4)) == (2,)
    assert question.options("precision", ("mixed-bf16", "bf16")) == ["bf16"]
    assert question.options("precision", ("mixed-bf16",)) == ("mixed-bf16",)  # which creating the run refuses


@pytest.mark.parametrize("batch", [8, 12])
def test_each_shape_divides_the_gpus_and_the_batch_without_a_remainder(batch):
    for shape in shapes(Question(SPEC, batch), machines("8xH100")):
        assert prod(shape[name] for name in ("dp", "tp", "pp", "cp")) == 8
        assert shape["dp"] * shape["micro_batch"] * shape["accumulation"] == batch
    assert divisors(batch) == tuple(n for n in range(1, batch + 1) if batch % n == 0)
