"""What the chapter on FLOPs and time derives by hand agrees with the estimate and with the simulation of the job."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.archive import held_out
from llmlab.course.job import GPU, MODEL, job
from llmlab.formulas.time.efficiency import efficiencies
from llmlab.formulas.time.elementwise import moved
from llmlab.formulas.time.flops import chinchilla_loss, flops

RUN, SPEC = job("04-precision"), lab.model(MODEL)
N, L, V, h, f, a, kd = SPEC.parameters, SPEC.layers, SPEC.vocab, SPEC.hidden, SPEC.intermediate, SPEC.heads, 512
S, T = RUN.seq_len, RUN.tokens
RATES = efficiencies()[GPU]
FLOP = 6 * N * T + 12 * L * h * S * T
LAYER = 64 * a * S + 240 * h + 92 * h + 60 * h + 96 * (h + kd) + 28 * f + 20 * h + 12 * kd  # bytes per token


def test_the_flop_of_a_step_are_those_of_weights_and_of_attention():
    norms = 6 * T * (2 * L + 1) * h  # counted in N, but no matmul
    assert flops(SPEC, RUN).total == FLOP - norms


def test_the_rates_of_a_t4_are_those_that_the_page_and_chapter_4_name():
    assert RATES.matmul["fp16"] == 19.6e12 and RATES.matmul["fp32"] == 4.26e12 and RATES.bandwidth == 214e9
    assert RATES.derived_from.startswith("32 LoRA and QLoRA steps")


def test_the_bytes_of_elementwise_kernels_are_those_of_the_tables():
    traffic = moved(SPEC, RUN, lab.gpu(GPU))
    mask = 4 * S * L * T  # read once for all heads
    assert traffic.blocks == pytest.approx(L * T * LAYER + 12 * (N - V * h) + mask, rel=0.001)
    assert traffic.loss + traffic.again == 48 * T * V


def test_the_step_is_the_sum_that_the_page_derives():
    report = lab.estimate(MODEL, RUN, GPU)
    assert report.time["optimizer"] == pytest.approx(84 * N / RATES.bandwidth, rel=0.005)  # the rest are launches
    by_hand = FLOP / RATES.matmul["fp16"] + (L * T * LAYER + 12 * (N - V * h) + 48 * T * V + 84 * N) / RATES.bandwidth
    assert report.step_seconds == pytest.approx(by_hand, rel=0.005)


def test_full_checkpointing_recomputes_neither_the_head_nor_the_last_matmul_of_a_block():
    again = 2 * T * (N - V * h - L * f * h) + 4 * L * h * S * T
    assert flops(SPEC, replace(RUN, checkpointing="full")).recomputed == pytest.approx(again, rel=1e-3)


def test_only_the_linear_layers_of_the_job_lie_right_of_the_ridge():
    from llmlab.simulation.report import recorded

    shallow = SPEC.config | {"num_hidden_layers": 1}
    operators = recorded(shallow, RUN, lab.gpu(GPU)).operators
    ridge = RATES.matmul["fp16"] / RATES.bandwidth
    right = {name.split()[0] for (_, name), (flop, size, _) in operators.by_operator().items() if flop > ridge * size}
    assert right == {"mm"}


def test_each_of_adamws_eight_operators_counts_one_flop_per_parameter():
    from llmlab.simulation.report import recorded

    shallow = lab.model(SPEC.config | {"num_hidden_layers": 1})
    operators = recorded(shallow, RUN, lab.gpu(GPU)).operators.by_operator()
    adamw = [size for (_, name), size in operators.items() if name.startswith("_foreach")]
    assert sum(flop for flop, *_ in adamw) == 8 * shallow.parameters


def test_an_h200_waits_for_the_host_with_few_tokens():
    times = [
        lab.estimate(MODEL, replace(RUN, micro_batch=1, seq_len=length, precision="autocast-bf16"), "H200")
        for length in (128, 512, 1024)
    ]
    assert [report.step_seconds for report in times] == pytest.approx([times[0].step_seconds] * 3)
    assert [report.time["launches"] for report in times] == sorted((r.time["launches"] for r in times), reverse=True)


def test_the_t4_runs_that_were_not_fitted():
    unseen = [one for one in lab.records(gpu=GPU) if one.step_seconds and held_out(one)]
    errors = [lab.estimate(one.model, one.run, GPU).step_seconds / one.step_seconds - 1 for one in unseen]
    assert len(errors) >= 37 and max(map(abs, errors)) < 0.38
    assert all(one.run.lora for one in unseen)  # none trains all weights, as the job does


def test_no_data_give_8_billion_parameters_the_loss_of_70_billion():
    assert chinchilla_loss(8e9, 1e30) > chinchilla_loss(70e9, 20 * 70e9)
    assert chinchilla_loss(8e9, 101.2 * 8e9) < chinchilla_loss(16e9, 20 * 16e9) < chinchilla_loss(8e9, 100 * 8e9)
