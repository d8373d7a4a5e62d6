"""The runs that a plan compares."""

from math import prod

import pytest

import llmlab as lab
from llmlab.planning.machines import machines
from llmlab.planning.space import Question, divisors, lengths, shapes, shares

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


def test_a_training_is_late_if_its_steps_take_longer_than_the_days_it_has():
    """A billion tokens in steps of 8 × 1,024 are 122,070 steps; a day has 86,400 s."""
    run, day = lab.Training(8, 1024), Question(SPEC, 8, tokens=10**9, within=1.0)
    assert not day.late(0.70, run) and day.late(0.71, run)
    assert not Question(SPEC, 8, tokens=10**9).late(1e9, run)


def test_shorter_sequences_keep_the_tokens_of_an_update():
    assert list(lengths(Question(SPEC, 8, allow=frozenset(["seq_len"]), fixed={"seq_len": 2048}))) == [
        (2048, 8), (1024, 16), (512, 32)]  # fmt: skip
    assert list(lengths(Question(SPEC, 8, fixed={"seq_len": 2048}))) == [(2048, 8)]


def test_a_share_is_of_a_zero_stage_and_what_is_offloaded_is_sharded():
    found = list(shares(Question(SPEC, 8), machines("8xH100"), 8))
    both = "optimizer+parameters"
    assert {(each["zero"], each["offload"]) for each in found} == {
        (0, None), (1, None), (2, None), (3, None), (2, "optimizer"), (3, both)}  # fmt: skip
    copies = {each["dp_replicate"] for each in found if each["zero"] >= 2 and not each["offload"]}
    assert copies == {1, 2, 4} and {each["ep"] for each in found} == {1}
    assert {each["dp_replicate"] for each in found if each["zero"] < 2 or each["offload"]} == {1}
    mixtral = Question(lab.model("Mixtral-8x7B"), 8, allow=frozenset(["optimizer"]))
    experts = list(shares(mixtral, machines("8xH100"), 8))
    assert {each["ep"] for each in experts} == {1, 2, 4, 8}
    assert all(8 // each["dp_replicate"] % each["ep"] == 0 for each in experts)
    muon = [each for each in experts if each["optimizer"] == "muon"]
    assert {(each["ep"], each["zero"], each["offload"]) for each in muon} == {(1, 0, None)}
    assert [each["zero"] for each in shares(Question(SPEC, 8), machines("1xH100"), 1)] == [0, 2, 3]


@pytest.mark.parametrize(("method", "gpu", "precisions"), [
    ("full", "8xH100", {"autocast-bf16", "mixed-bf16"}), ("full", "8xT4", {"autocast-fp16", "mixed-fp16"}),
    ("lora", "8xH100", {"bf16"}), ("qlora", "8xT4", {"fp16"}),
])  # fmt: skip
def test_precisions_are_those_of_the_gpu_and_of_the_method(method, gpu, precisions):
    found = list(shapes(Question(SPEC, 8, method), machines(gpu)))
    assert {shape["precision"] for shape in found} == precisions
    assert {shape.get("quantization") for shape in found} == {"nf4" if method == "qlora" else None}
    assert all(("lora" in shape) == (method != "full") and shape["sequence_parallel"] == (shape["tp"] > 1)
               for shape in found)  # fmt: skip
    assert {shape["tp"] for shape in found} == {1, 2, 4, 8} and max(shape["cp"] for shape in found) == 1
    long = {shape["cp"] for shape in shapes(Question(SPEC, 8, fixed={"seq_len": 4096}), machines(gpu))}
    assert long == {1, 2, 4}  # of at least 1,024 tokens
