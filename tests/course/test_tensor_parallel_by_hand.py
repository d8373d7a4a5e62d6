"""The sums that the chapter on tensor parallelism does by hand agree with the estimate."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.course.experiments.tensor_parallel import collectives_per_layer
from llmlab.course.job import H100, MODEL_8B, MODEL_70B, states
from llmlab.formulas.time.communication import bytes_sent, seconds
from llmlab.formulas.time.distributed import step
from llmlab.formulas.time.efficiency import efficiency
from llmlab.hardware.links import base_seconds, cluster, link, pcie_rates

SPEC, FAST = lab.model(MODEL_70B), cluster(H100, "InfiniBand-NDR")
CHECKPOINTED, UNDIVIDED, SPLIT = (state.run for state in states("14-tensor-and-sequence-parallel")[:3])
L, S, N, TP = SPEC.layers, UNDIVIDED.seq_len, SPEC.parameters, SPLIT.tp
h, f, a, kd = SPEC.hidden, SPEC.intermediate, SPEC.heads, SPEC.kv_heads * SPEC.head_dim
INSIDE = 4 * h + 8 * f + 4 * kd + 4 * a
F, BOUND = efficiency(H100).matmul["bf16"], 4.5 * h / efficiency(H100).matmul["bf16"]


def activations(**changes):
    return lab.estimate(MODEL_70B, replace(SPLIT, **changes), H100).parts["activations"]


def test_zero_divides_states_and_no_activations():
    few, many = (lab.estimate(MODEL_70B, replace(UNDIVIDED, dp=dp), H100).parts["activations"] for dp in (8, 512))
    # At the peak, the gradients of the second block from the end are complete.
    assert few == many == pytest.approx((L - 2) * S * (16 * h + INSIDE), rel=0.015)


def test_lab_explain_finds_the_tensors_of_the_table():
    terms = lab.explain(MODEL_70B, UNDIVIDED, H100).terms
    saved = [term for term in terms if term.part == "activations" and ".layers" in term.module]
    of_a_layer = {(t.module, t.operator, t.formula): t.bytes / t.count * round(t.count / L) for t in saved}
    assert sum(of_a_layer.values()) == pytest.approx(S * (16 * h + INSIDE), rel=0.005)
    assert not any("S²" in term.formula for term in saved)
    eager = lab.explain(MODEL_70B, replace(UNDIVIDED, attention="eager"), H100).terms
    scores = [t.bytes / t.count for t in eager if t.part == "activations" and "S²" in t.formula]
    assert sum(scores) == 6 * a * S**2


def test_tensor_parallelism_divides_what_lies_inside_of_the_pairs_and_sequence_parallelism_the_norms():
    assert activations(sequence_parallel=False) == pytest.approx(L * S * (16 * h + INSIDE / TP), rel=0.01)
    assert activations() == pytest.approx(L * S * (4 * h + (12 * h + INSIDE) / TP), rel=0.01)


def test_checkpointing_repeats_all_matmuls_of_a_layer_except_the_last():
    matrices = 2 * h * h + 2 * h * kd + 3 * h * f
    assert matrices == 12.75 * h**2
    ratio = step(MODEL_70B, CHECKPOINTED, H100, FAST).products / step(MODEL_70B, UNDIVIDED, H100, FAST).products
    assert ratio == pytest.approx(1 + (matrices - h * f) / matrices / 3, abs=0.01)


def test_both_versions_send_the_same_bytes():
    whole, halves = collectives_per_layer(False), collectives_per_layer(True)
    assert whole == {"all-reduce": 4, "all-gather": 0, "reduce-scatter": 0}
    assert halves == {"all-reduce": 0, "all-gather": 4, "reduce-scatter": 4}
    size = 2 * S * h
    sent = [sum(n * bytes_sent(kind, size, TP) for kind, n in counts.items()) for counts in (whole, halves)]
    assert sent[0] == sent[1] == 16 * S * h * (TP - 1) / TP
    once, twice = (sum(seconds(kind, size, FAST.group(8)) for kind in kinds)
                   for kinds in (("all-reduce",), ("all-gather", "reduce-scatter")))  # fmt: skip
    assert once < twice  # the switch sums an all-reduce


def test_the_messages_of_a_step():
    nvlink, predicted = link("NVLink-4"), step(MODEL_70B, SPLIT, H100, FAST)
    half = base_seconds() + 7 * nvlink.step + 7 / 8 * 2 * S * h / nvlink.reached
    assert predicted.tensor == pytest.approx(8 * half * L * SPLIT.accumulation, rel=0.08)
    assert predicted.data_sent == pytest.approx(2 * 63 / 64 * 2 * N / TP / link("InfiniBand-NDR").reached, rel=0.21)


def test_the_bound_of_the_worked_problems():
    alone, nvlink, network = cluster(H100, "InfiniBand-NDR", gpus=1), link("NVLink-4"), link("InfiniBand-NDR")
    assert BOUND * nvlink.reached == pytest.approx(22, abs=0.1)
    assert BOUND * network.reached == pytest.approx(2.9, abs=0.06)
    for tp, nodes, beta in ((8, FAST, nvlink), (4, alone, network), (8, alone, network)):
        run = replace(SPLIT, tp=tp, dp=512 // tp, accumulation=2 * tp)
        predicted = step(MODEL_70B, run, H100, nodes)
        assert predicted.tensor / predicted.products == pytest.approx((tp - 1) / (BOUND * beta.reached), rel=0.2)
    desktop = cluster("RTX-4090")
    beta, rate = pcie_rates(desktop.inside, 2, False).median, lab.gpu("RTX-4090").peak_flops["bf16"]
    assert 4.5 * lab.model(MODEL_8B).hidden * beta / rate == pytest.approx(0.9, abs=0.02)


def test_the_smallest_degree_that_fits_is_the_fastest_that_fits():
    reports = {tp: lab.estimate(MODEL_70B, replace(SPLIT, tp=tp, dp=512 // tp, accumulation=2 * tp), H100)
               for tp in (2, 4, 8, 16)}  # fmt: skip
    assert [report.outcome == "fits" for report in reports.values()] == [False, False, True, True]
    assert sorted(reports, key=lambda tp: reports[tp].step_seconds) == [2, 4, 8, 16]
