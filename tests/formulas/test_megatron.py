"""Megatron-LM's block and step, held to the paper's formula, to its schedules and to its own golden values."""

from dataclasses import replace

import pytest

import llmlab as lab
from benchmarks.memory import megatron_runs
from llmlab.formulas.memory.activations import korthikanti_block

RUN, OWN = megatron_runs.TE, "megatron:transformer_engine=False"


def memory(run, stage=0):
    return megatron_runs.memory(run, "A100-80GB", stage)


def kept(run):
    return sum(memory(run).whole.values())


# ---- the block


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_block_is_the_papers(tp, sequence_parallel):
    run = replace(RUN, tp=tp, sequence_parallel=sequence_parallel and tp > 1)
    s, b, h, a = run.seq, run.micro_batch, run.hidden, run.heads
    # The paper leaves out what norms keep of a row: its mean and 1/std in fp32.
    statistics = 2 * 8 * s * b // (tp if run.sequence_parallel else 1)
    assert kept(run) == korthikanti_block(s, b, h, a, tp, run.sequence_parallel) + statistics
    masks = 2 * s * b * h // (tp if run.sequence_parallel else 1)  # of a byte, after attention and the MLP
    assert memory(run).whole["dropout masks"] == masks


def test_recomputing_core_attention_leaves_34sbh():
    run = replace(RUN, tp=2, sequence_parallel=True, recompute="selective")
    s, b, h = run.seq, run.micro_batch, run.hidden
    assert sum(memory(run).activations_by_kind.values()) == run.layers * (34 * s * b * h + 2 * 8 * s * b) // 2


# ---- options of NeMo's recipes


def test_an_mlp_with_biases_is_not_computed_again():
    run = lab.Training(stack=lab.Megatron(recompute="selective", recompute_modules="core_attn mlp"))
    with pytest.raises(lab.SpecError, match="checkpoint recurses without end in backward"):
        lab.estimate("gpt2", run, "H100-80GB")


def test_own_layers_are_unfused_where_nobody_says_otherwise():
    assert lab.Training(stack=OWN).attention == "eager"


def test_apexs_softmax_takes_certain_shapes():
    run = replace(megatron_runs.LOCAL, micro_batch=1, tp=2)  # 4 heads of a rank, and 3 with 6 heads
    fused, other = memory(run), memory(replace(run, heads=6, hidden=384))
    scores = lambda found, heads: found.whole["scores"] / (run.seq**2 * heads)  # noqa: E731
    assert (scores(fused, 4), scores(other, 3)) == (2 + 2 + 1, 4 + 2 + 1)  # softmax, what multiplies values, the mask
