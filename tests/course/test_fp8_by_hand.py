"""The sums by hand of the page on fp8 are those of the verbs: the job's memory on an H100, casts, and when fp8 pays."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.course.job import MODEL, job
from llmlab.formulas.time.elementwise import fp8_casts
from llmlab.formulas.time.kernels import kernels

H100, T = "H100-80GB", 4096
L, h, f, V, kd = 16, 2048, 8192, 128_256, 512
N, P = lab.model(MODEL).parameters, L * (2 * h * h + 2 * h * kd + 3 * h * f)
MOVES = (
    {"precision": "autocast-bf16", "attention": "flash"},
    {"checkpointing": None},
    {"optimizer": "adamw-fused"},
    {"kernels": None, "compile": True},
    {"precision": "mixed-bf16"},
)


def moved():
    runs, run = [], job("10-flash-attention")
    for fields in MOVES:
        run = replace(run, **fields)
        runs.append(run)
    return runs


JOB = moved()[-1]


def seconds(run, gpu=H100):
    return lab.estimate(MODEL, run, gpu).step_seconds


def limit():
    card = kernels(H100)
    f16, f8 = card.gpu.peak("bf16") * card.sustained, card.gpu.peak("fp8") * card.sustained_fp8
    return 6 * card.bandwidth * (1 / f16 - 1 / f8)


def test_every_rung_that_is_undone_saves_time_and_all_fit():
    reports = [lab.estimate(MODEL, run, H100) for run in moved()]
    times = [report.step_seconds for report in reports]
    assert times == sorted(times, reverse=True)
    assert {report.outcome for report in reports} == {"fits"}


@pytest.mark.parametrize("fields", [{"attention": "eager"}, {"compile": False},
                                    {"precision": "fp32", "attention": "sdpa"}])  # fmt: skip
def test_the_rungs_that_stay_save_more_than_fp8(fields):
    assert seconds(replace(JOB, **fields)) - seconds(JOB) > seconds(JOB) - seconds(replace(JOB, fp8="tensorwise")) > 0


def test_the_peak_in_eager_and_in_compiled_code():
    eager = 14 * N + T * (L * (20 * h + 4 * kd + 8 * f) + 8 * h + 14 * V)
    compiled = 14 * N + T * (L * (12 * h + 4 * kd + 6 * f) + 4 * h + 6 * V)
    assert lab.estimate(MODEL, replace(JOB, compile=False), H100).peak_allocated == pytest.approx(eager, rel=0.005)
    assert lab.estimate(MODEL, JOB, H100).peak_allocated == pytest.approx(compiled, rel=0.005)
    again = T * L * (4 * h + 2 * f)  # outputs of norms, SiLU(gate) · up: in fp8 computed again for the casts
    for fp8 in ("tensorwise", "rowwise"):
        peak = lab.estimate(MODEL, replace(JOB, fp8=fp8), H100).peak_allocated
        assert peak == pytest.approx(compiled - again, rel=0.005)


@pytest.mark.parametrize(("recipe", "activation", "weight"), [("tensorwise", 6, 8), ("rowwise", 8, 10)])
def test_the_casts_move_this_many_bytes(recipe, activation, weight):
    numbers = 6 * h + 2 * kd + 3 * f
    by_hand = activation * numbers * L * T + weight * P
    assert fp8_casts(lab.model(MODEL), replace(JOB, fp8=recipe)) == by_hand
    plain, eight = (lab.estimate(MODEL, replace(JOB, fp8=fp8), H100).time for fp8 in (None, recipe))
    assert eight["elementwise"] - plain["elementwise"] == pytest.approx(by_hand / kernels(H100).bandwidth)
    assert plain["products"] - eight["products"] == pytest.approx(limit() * P * T / kernels(H100).bandwidth, rel=0.06)


def test_fp8_pays_with_4096_tokens_together_and_not_with_1024():
    short = replace(JOB, micro_batch=1, accumulation=4)
    assert 1.03 < seconds(JOB) / seconds(replace(JOB, fp8="tensorwise")) < 1.08
    assert seconds(replace(short, fp8="tensorwise")) > 1.1 * seconds(short)


def test_the_inequality_and_what_torchao_measured_of_single_layers():
    """pytorch/ao at 0cf1281a, torchao/float8/README.md, Performance: (tokens, inputs, outputs) and the speedup."""
    card = kernels(H100)
    f16, f8 = card.gpu.peak("bf16") * card.sustained, card.gpu.peak("fp8") * card.sustained_fp8
    for (tokens, k, n), measured in {(1024, 2048, 1024): 0.80, (4096, 8192, 16384): 1.39}.items():
        flop, casts = 6 * tokens * k * n, 6 * tokens * (k + n) + 8 * k * n
        assert flop / f16 / (flop / f8 + casts / card.bandwidth) == pytest.approx(measured, rel=0.1)
        assert (6 / k + 6 / n + 8 / tokens < limit()) == (measured > 1)


def test_codes_in_the_place_of_inputs_save_less_than_the_weights_in_fp8_take():
    def peak(recipe):
        run = lab.Training(4, 1024, precision="mixed-bf16", stack=lab.Megatron(fp8_recipe=recipe))
        return lab.estimate(MODEL, run, H100).peak_allocated

    assert peak("tensorwise") - peak(None) == pytest.approx(2 * P - L * T * (f + h), rel=0.01)
