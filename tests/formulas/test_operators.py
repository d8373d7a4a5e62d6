"""The time of traced operators."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from benchmarks.time import efficiencies as derivation
from llmlab import Training
from llmlab.archive import operator_records
from llmlab.formulas.time.efficiency import Efficiency
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.operators import kernel_seconds, timing
from llmlab.simulation.profile.operator_log import Operators
from llmlab.simulation.report import recorded
from llmlab.traces.kernels import Kernel

A100_ROWS = operator_records(provider="huggingface", metric="time", gpu="A100-80GB")


def test_operators_of_any_code():
    record = next(r for r in A100_ROWS if r.operator == "geglu" and r.mode == "full" and r.sizes["T"] == 1024)
    kernels = derivation.operator_kernels(record)
    assert kernels.seconds == pytest.approx(record.value, rel=0.10)
    sizes = record.sizes
    once = 2 * sizes["bsz"] * sizes["T"] * sizes["hidden_size"] * sizes["intermediate_size"]
    assert kernels.flops == 3 * 3 * once  # three products, each forward and twice backward


def test_a_card_that_nobody_measured_has_a_time_and_a_wider_interval():
    run = Training(micro_batch=16, precision="bf16")  # in which no GPU waits for its host
    config = {**lab.model("gpt2").config, "n_layer": 1, "vocab_size": 50304}
    wide = []
    for gpu in ("A100", "H100", "RTX-4090"):
        report = lab.simulate(config, run, gpu)
        assert report.step_seconds_low < report.step_seconds < report.step_seconds_high and report.mfu
        wide.append(report.step_seconds / report.step_seconds_low)  # so short a step may be longer, on any GPU
    assert wide[1] <= wide[0] < 1.05 * wide[1] < wide[2]  # an A100's head is beyond the sizes measured


def test_a_compiled_step_takes_its_fused_kernels_bytes_and_hardly_waits():
    config = {**lab.model("gpt2").config, "n_layer": 1, "vocab_size": 50304}  # which a compiler has no need to pad
    run = Training(micro_batch=8, seq_len=1024, precision="bf16")
    eager, compiled = (lab.simulate(config, replace(run, compile=each), "A100") for each in (False, True))
    assert compiled.step_seconds_low < compiled.step_seconds < compiled.step_seconds_high and compiled.mfu
    assert compiled.time["elementwise"] < 0.7 * eager.time["elementwise"]
    assert compiled.time["products"] == pytest.approx(eager.time["products"], rel=0.02)
    assert compiled.time.get("launches", 0.0) < 0.2 * eager.time["launches"]
    assert not any(note.code == "triton-kernels" for note in compiled.notes)


def test_what_ranks_send_is_no_kernel_and_fsdp_s_copies_are():
    config = {**lab.model("meta-llama/Llama-3.2-1B").config, "num_hidden_layers": 2}
    run = Training(seq_len=256, precision="mixed-bf16", dp=8, zero=3)
    operators = recorded(config, run, "H100").operators
    sent = [each for each in operators if each.kind == "sent"]
    assert {each.name for each in sent} >= {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}
    rates = kernels("H100").operators
    assert sum(kernel_seconds(each, rates) for each in sent) == 0
    whole = 2 * lab.model(config).parameters
    copied = sum(each.bytes for each in operators if each.name == "fsdp::split_with_sizes_copy")
    assert copied == pytest.approx(2 * 2 * whole, rel=0.01)  # read and written, before forward and before backward


RATES = Efficiency(
    gpu="made up", sms=40, bandwidth=2e11, strided=1e11, gather=1e11, matmul={"fp16": 2e13}, attention={"fp16": 1e13},
    launch=2e-6, dispatch=4e-5, view=6e-6, backward_dispatch=0.6, cache=4e6,
)  # fmt: skip
SIZE = st.integers(1, 1 << 14)


def product(M, N, K):
    return Kernel("aten::mm", "matmul", "fp16", 2 * M * N * K, 2 * (M * K + K * N + M * N), (1, M, N, K), 1, False, "")


@settings(max_examples=300, deadline=None)
@given(M=SIZE, N=SIZE, K=SIZE, more=SIZE)
def test_a_larger_product_never_takes_less_time(M, N, K, more):
    now = kernel_seconds(product(M, N, K), RATES)
    assert kernel_seconds(product(M + more, N, K), RATES) >= now * (1 - 1e-9)
    assert kernel_seconds(product(M, N + more, K), RATES) >= now * (1 - 1e-9)
    assert kernel_seconds(product(M, N, K + more), RATES) >= now * (1 - 1e-9)
    assert now >= 2 * M * N * K / RATES.matmul["fp16"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SIZE, SIZE, SIZE), min_size=1, max_size=20), st.integers(0, 19))
def test_a_step_takes_at_least_its_kernels_and_their_starts(sizes, extra):
    kernels = [product(*size) for size in sizes]
    found = timing(kernels, RATES)
    assert max(found.gpu, found.host) <= found.step <= found.gpu + found.host
    longer = timing([*kernels, kernels[extra % len(kernels)]], RATES)
    assert longer.step > found.step


def test_an_empty_list_of_operators_takes_no_time():
    assert Operators(lab.gpu("T4")).seconds == 0
    assert Operators().seconds is None
