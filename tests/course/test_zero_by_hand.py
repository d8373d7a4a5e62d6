"""The sums that the chapter on ZeRO does by hand agree with the estimate."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.course.job import H100, MODEL_8B, states
from llmlab.formulas.time.communication import bytes_sent
from llmlab.formulas.time.distributed import step
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.kernels import kernels, training_rates
from llmlab.hardware.gpu import gpu
from llmlab.hardware.links import cluster

SPEC, DP = lab.model(MODEL_8B), 8
N, L, H, V, T = SPEC.parameters, SPEC.layers, SPEC.hidden, SPEC.vocab, 4096
ZERO_1, ZERO_2, ZERO_3, LAST = (state.run for state in states("12-zero") if state.run.zero)
BLOCK = (N - 2 * V * H - H) // L
LOSS = 14 * T * V + 8 * T * H
GATHERED = 4 * V * H + 2 * BLOCK
SAVED = (20 * H + 4 * SPEC.kv_heads * SPEC.head_dim + 8 * SPEC.intermediate + 4 * SPEC.heads) * T
FAST, SHARED = cluster(H100, "InfiniBand-NDR"), cluster(H100, "InfiniBand-NDR", adapters=1)


def peak(run):
    return lab.estimate(MODEL_8B, run, H100).peak_allocated


@pytest.mark.parametrize("run, by_hand", [
    (ZERO_1, 4 * N + 16 * N / DP + 2 * T * V),
    (ZERO_2, 2 * N + 12 * N / DP + LOSS + 2 * T * H * L),
    (ZERO_3, GATHERED + 12 * N / DP + LOSS + 2 * T * H * L),
    (LAST, GATHERED + 12 * N / DP + LOSS + SAVED * L),
    (replace(ZERO_3, stack="deepspeed"), 16 * N / DP + 2 * 10**9 + 10**9 + LOSS + 2 * T * H * L),
])  # fmt: skip
def test_peaks(run, by_hand):
    assert peak(run) == pytest.approx(by_hand, rel=4e-3)


def test_messages_copies_and_updates_on_eight_gpus():
    memory, one = kernels(gpu(H100)).bandwidth, bytes_sent("all-gather", 2 * N, DP) / FAST.group(DP).bandwidth
    contention = training_rates()["scale"]["contention"]
    for run, messages, updated, copied in ((ZERO_1, 2, 40, 0), (ZERO_2, 2, 84, 9.25), (ZERO_3, 3, 84, 14.5)):
        predicted = step(MODEL_8B, run, H100, FAST)
        assert predicted.data_sent == pytest.approx(messages * one, rel=0.13)  # the rest is latency
        launches = 0 if run is ZERO_1 else 8 * N / DP / (320 * 65536)  # of AdamW on lists, not of master copies
        launching = launches * kernels(gpu(H100)).operators.launch
        assert predicted.update == pytest.approx(updated * N / DP / memory + launching, rel=0.01)
        hidden = 1 - predicted.data_exposed / predicted.data_sent
        slowdown = contention * hidden * messages * one
        assert predicted.data == pytest.approx(predicted.data_exposed + slowdown + copied * N / memory, rel=0.01)


def test_on_one_machine_a_lower_stage_without_checkpointing_is_faster_than_zero_3():
    times = [lab.estimate(MODEL_8B, replace(LAST, zero=stage), H100) for stage in (1, 2, 3)]
    assert [report.outcome for report in times] == ["fits"] * 3
    assert max(report.step_seconds for report in times[:2]) < 0.96 * times[2].step_seconds


def test_the_worked_problems():
    rate, link = efficiency(H100).matmul["bf16"], FAST.group(DP).bandwidth
    assert 7 / 8 * rate / link == pytest.approx(1462, rel=2e-3)
    many = replace(ZERO_3, dp=512)
    latency = 63 * 14e-6 + 448 * 3.4e-6
    gather = latency + 511 / 512 * 2 * BLOCK / FAST.group(512).bandwidth
    layer = step(MODEL_8B, many, H100, FAST).layer
    assert layer["gather"] == pytest.approx(gather, rel=0.01)
    assert T * gather / layer["forward"] == pytest.approx(3200, rel=0.01)
    assert rate / SHARED.group(512).bandwidth == pytest.approx(12_900, rel=0.01)
    card = gpu("RTX-4090")
    predicted = step(MODEL_8B, ZERO_3, card, cluster(card))
    assert predicted.data_exposed == pytest.approx(0.5 * predicted.seconds, rel=0.03)


def test_stragglers_and_not_reductions_separate_zero_1_from_zero_2():
    long = replace(ZERO_3, dp=64, accumulation=8)
    one, two = (step(MODEL_8B, replace(long, zero=stage), H100, FAST) for stage in (1, 2))
    longer = two.seconds - one.seconds
    assert two.scale - one.scale > 0.7 * longer > 2 * (two.data_exposed - one.data_exposed)
