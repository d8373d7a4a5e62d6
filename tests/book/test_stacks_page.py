"""The sentences of book/stacks.md about its estimates hold."""

import re
from pathlib import Path

import pytest

import llmlab as lab
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.step import step_memory

SOURCE = (Path(__file__).resolve().parents[2] / "book" / "stacks.md").read_text(encoding="utf-8")
MODEL = lab.model("meta-llama/Meta-Llama-3-8B")
GPU, RANKS, S = "H100-80GB", 8, 8192
N, V, H = MODEL.parameters, MODEL.vocab, MODEL.hidden
SHARDING = {"transformers": {"zero": 3, "precision": "mixed-bf16"}, "megatron": {"zero": 1}}
STACKS = ("transformers", "torchtitan", "megatron", "torchtune")
PIPELINE = {"dp": RANKS, "zero": 1, "pp": 4, "accumulation": 8}


def estimate(stack, **options):
    sharding = SHARDING.get(stack.split(":")[0], {})
    options = {"checkpointing": "full", "dp": RANKS, **sharding, **options}
    return lab.estimate(MODEL, lab.Training(seq_len=S, stack=stack, **options), GPU)


@pytest.fixture(scope="module")
def reports():
    return {stack: estimate(stack) for stack in STACKS}


def stages_of(stack):
    run = lab.Training(seq_len=S, stack=stack, **PIPELINE)
    stages = [step_memory(share_of(MODEL, run, lab.gpu(GPU), stage=stage)) for stage in range(4)]
    return stages, [max(stage.moments(), key=lambda moment: moment.total) for stage in stages]


def test_states_are_whole_or_sharded(reports):
    states = {stack: round(report.parts["optimizer"] * RANKS / N) for stack, report in reports.items()}
    assert states == {"transformers": 12, "torchtitan": 12, "megatron": 12, "torchtune": 4}
    assert [round(reports["megatron"].parts[part] / N) for part in ("weights", "gradients")] == [2, 4]
    head, block = 2 * V * H, 2 * (N - 2 * V * H) / MODEL.layers
    assert reports["torchtitan"].parts["weights"] == pytest.approx(head, rel=0.01)
    assert reports["transformers"].parts["weights"] == pytest.approx(2 * head + block, rel=0.01)
    assert reports["torchtune"].parts["weights"] == pytest.approx(2 * N / RANKS, rel=0.01)


def test_copies_of_the_logits(reports):
    copies = {stack: report.parts["logits"] / (S * V) for stack, report in reports.items()}
    assert copies == pytest.approx({"transformers": 14, "torchtitan": 12, "megatron": 6, "torchtune": 6.5}, abs=0.05)
    highest = [max(report.phases, key=report.phases.get) for report in reports.values()]
    assert highest[:2] == ["backward"] * 2 and "backward" not in highest[2:]


def test_the_last_stage_of_a_pipeline_never_needs_the_least():
    _, plain = stages_of("megatron")
    assert plain[2].total < plain[3].total < 1.1 * plain[2].total < plain[1].total
    stages, virtual = stages_of("megatron:virtual_pipeline=8")
    assert 0.95 * virtual[0].total < virtual[3].total and virtual[1].total < virtual[3].total
    assert [stage.in_flight for stage in stages] == [35, 33, 31, 29]
    states = sum(virtual[3].parts[part] - virtual[2].parts[part] for part in ("weights", "gradients", "optimizer"))
    assert states == (2 + 4 + 12 / RANKS) * V * H and virtual[3].parts["logits"] == (2 + 4) * S * V
    assert stages[3].moments()[-1].parts["other"] == 2 * 8 * 2 * S * H
    _, recomputed = stages_of("megatron:recompute=full")
    assert max(recomputed, key=lambda moment: moment.total) is recomputed[3]


def test_compiled_fp8_and_context_parallel_steps_of_torchtitan():
    ways = {"eager": {}, "compiled": {"compile": True}, "tensor": {"compile": True, "fp8": "tensorwise"},
            "row": {"compile": True, "fp8": "rowwise"}, "cp": {"cp": 2}}  # fmt: skip
    kept = {
        way: estimate("torchtitan:ac=none", checkpointing=None, **options).detail["activations"]
        for way, options in ways.items()
    }
    assert kept["compiled"]["mlp"] * 4 == kept["eager"]["mlp"] * 3
    assert {kept[way]["mlp"] for way in ("tensor", "row", "cp")} == {kept["eager"]["mlp"] / 2}
    assert "linear inputs" not in kept["tensor"] and "linear inputs" not in kept["row"]
    weights = sum(linear.elements for linear in MODEL.block_linears if linear.part == "mlp")
    assert kept["tensor"]["linear weights"] == pytest.approx(weights, rel=0.001) and "linear weights" not in kept["row"]
    steps = [estimate("torchtitan", checkpointing="selective", **ways[way]) for way in ("compiled", "tensor", "row")]
    assert all(report.peak_at in ("the loss", "the gradient of the logits") for report in steps)
    sizes = [report.peak_allocated for report in steps]
    assert max(sizes) < 1.01 * min(sizes)


def test_the_page_has_no_asserts():
    assert not re.search(r"^\s*assert ", SOURCE, re.MULTILINE)
