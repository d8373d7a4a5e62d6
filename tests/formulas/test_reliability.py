"""Checkpoints: how large, how often, and what share of the time is left, against a simulation of failures."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from llmlab.archive import figure
from llmlab.base.errors import SpecError
from llmlab.formulas.reliability import best_interval, checkpoint_bytes, goodput, mtbf, save_seconds, time_shares, young

GPT2 = {
    "model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
}  # fmt: skip


def test_a_checkpoint_in_fp32_is_nanogpts_file():
    """Published: 1 542 470 366 bytes, of which 12 causal masks of 1024² fp32 numbers are no parameters."""
    without_biases = 124_337_664  # nanoGPT's model has none
    masks = 12 * 1024 * 1024 * 4
    spec = lab.model(GPT2)
    ours = checkpoint_bytes(spec, lab.Training()) / spec.parameters * without_biases
    assert ours + masks == pytest.approx(figure("gpt2-checkpoint-file").value, rel=1e-3)


@pytest.mark.parametrize(("precision", "each"), [("fp32", 12), ("autocast-bf16", 12), ("mixed-bf16", 14), ("bf16", 6)])
def test_bytes_a_parameter_and_the_same_however_it_is_cut(precision, each):
    spec = lab.model("meta-llama/Llama-3.1-8B")
    plain = checkpoint_bytes(spec, lab.Training(precision=precision))
    assert plain == each * spec.parameters
    cut = lab.Training(precision=precision, dp=8, tp=2, zero=3, sequence_parallel=True)
    assert checkpoint_bytes(spec, cut) == plain


def test_lora_saves_adapters_alone():
    run = lab.Training(lora=lab.LoRA(rank=8, targets=("q_proj",)), quantization="nf4", precision="autocast-bf16")
    spec = lab.model("meta-llama/Llama-3.1-8B")
    assert checkpoint_bytes(spec, run) == 12 * 32 * 8 * (4096 + 4096)


def test_many_writers_are_faster_until_the_storage_is_full():
    assert save_seconds(1000, 1, 10, 50) == 100
    assert save_seconds(1000, 4, 10, 50) == 25
    assert save_seconds(1000, 400, 10, 50) == 20


sizes = st.floats(1e-4, 1.0)


@given(ratio=sizes, restart=st.floats(0, 2))
def test_the_best_interval_is_best_whatever_a_restart_takes(ratio, restart):
    best = best_interval(ratio, 1.0)
    most = goodput(best, ratio, 1.0, restart)
    assert all(goodput(best * factor, ratio, 1.0, restart) < most for factor in (0.5, 0.9, 1.1, 2.0))


@given(ratio=st.floats(1e-6, 0.01))
def test_youngs_interval_is_a_first_order(ratio):
    """Daly's series: the best interval is Young's times 1 + x/3 + x²/9, less δ, where x² is δ/2M."""
    x = (ratio / 2) ** 0.5
    series = young(ratio, 1.0) * (1 + x / 3 + x * x / 9) - ratio
    assert best_interval(ratio, 1.0) == pytest.approx(series, rel=1e-3)
    lost = goodput(best_interval(ratio, 1.0), ratio, 1.0) - goodput(young(ratio, 1.0), ratio, 1.0)
    assert 0 <= lost < 0.001, "of the time, at most"


def test_the_first_order_of_goodput():
    assert 1 - goodput(1000, 10, 1e6, 100) == pytest.approx(10 / 1000 + 1000 / 2e6 + 100 / 1e6, rel=0.02)


def test_llama_3s_failures_leave_what_its_authors_say():
    """More than 90 % of the time counted, with a failure every three hours."""
    published = figure("llama-3-interruptions")
    between = published["days"] * 86400 / published["unexpected"]
    assert between / 3600 == pytest.approx(3.1, abs=0.05)
    run = lab.Training(precision="mixed-bf16")
    storage = figure("llama-3-storage")["sustained"]
    save = save_seconds(checkpoint_bytes("meta-llama/Llama-3.1-405B", run), 16384, 1e9, storage)
    assert goodput(best_interval(save, between), save, between, restart=600) > published["effective share, at least"]
    assert mtbf(16384, between * 16384) == between


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: young(0, 1), lambda: young(1, -1), lambda: best_interval(1, 0), lambda: goodput(0, 1, 1),
        lambda: goodput(1, 1, 1, -1), lambda: mtbf(0, 1), lambda: save_seconds(1, 0, 1, 1),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(SpecError, match=r"above 0|below 0"):
        wrong()


def test_a_job_that_never_reaches_a_checkpoint_has_no_goodput():
    assert goodput(1e6, 1, 1) == 0.0


@pytest.mark.parametrize(
    ("save", "mtbf", "restart"), [(10, 356_000, 600), (57, 11_000, 600), (60, 900, 300), (5, 99, 0)]
)
def test_shares_of_the_time_are_those_of_a_simulated_job(save, mtbf, restart):
    interval = best_interval(save, mtbf)
    shares = time_shares(interval, save, mtbf, restart)
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0
    assert shares["training"] == goodput(interval, save, mtbf, restart)
    random, spent = Random(0), dict.fromkeys(shares, 0.0)
    for _ in range(20_000):
        while (failure := random.expovariate(1 / mtbf)) < interval + save:
            spent["lost work"] += failure
            while restart and (failure := random.expovariate(1 / mtbf)) < restart:
                spent["restarts"] += failure
            spent["restarts"] += restart
        spent["training"] += interval
        spent["saves"] += save
    for part, share in shares.items():
        assert spent[part] / sum(spent.values()) == pytest.approx(share, abs=0.006)


def test_a_job_that_never_saves_in_time_loses_all():
    assert time_shares(1e6, 1, 1)["lost work"] == 1
