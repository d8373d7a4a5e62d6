"""The published throughputs and what is said about them."""

import json
from dataclasses import replace

import pytest

import llmlab as lab
from benchmarks.time import throughput


def test_every_row_is_a_run_that_can_be_asked_for():
    rows = throughput.rows()
    assert len({row.id for row in rows}) == len(rows)
    assert {row.group for row in rows} <= {*throughput.GROUPS, throughput.UNSEEN}
    for row in rows:
        assert row.measured > 0 and lab.model(row.model).parameters > 1e7


def test_each_row_is_predicted_once_before_it_has_a_group():
    predicted = [row for _, pairs in throughput.rounds(throughput.rows()) for row, _ in pairs]
    assert len({row.id for row in predicted}) == len(predicted) > 0
    assert throughput.UNSEEN not in {row.group for row in predicted}


def test_a_row_is_predicted_for_the_first_time_once(tmp_path, monkeypatch):
    kept = tmp_path / "predictions.json"
    kept.write_text('{"rounds": [\n  {"round": 1, "date": "2026-01-01", "predicted": {\n    "a": null\n  }}\n]}\n')
    monkeypatch.setattr(throughput, "PREDICTIONS", kept)
    new = [row for row in throughput.rows() if row.source == "nanogpt"]
    throughput.record(new, "2026-01-02")
    first, second = json.loads(kept.read_text())["rounds"]
    assert first["predicted"] == {"a": None}
    assert second["round"] == 2 and list(second["predicted"]) == [row.id for row in new]
    assert second["predicted"][new[0].id][0] == pytest.approx(throughput.predict(new[0]).rate, rel=0.001)
    with pytest.raises(ValueError, match="predicted before: nanogpt-eager"):
        throughput.record(new, "2026-01-03")


def test_a_card_without_its_own_kernels_takes_those_of_the_next():
    row = next(row for row in throughput.rows() if row.card == "H200" and row.run.world_size > 1)
    own = throughput.predict(row)
    with throughput.without("H200"):
        assert throughput.times.kernels("H200").base.name == "H100-80GB"
        other = throughput.predict(row)
    assert other.rate == pytest.approx(own.rate, rel=0.15)
    assert other.high / other.low > own.high / own.low
    assert throughput.predict(row) == own


def test_a_row_can_have_a_power_limit():
    """750 of a B200's 1000 W: the cube root of a quarter fewer clocks."""
    row = next(row for row in throughput.rows() if row.id == "ao-b200-bf16")
    free = throughput.predict(replace(row, power=None)).rate
    assert row.power == 750 and 0.75 ** (1 / 3) < throughput.predict(row).rate / free < 0.95


def test_seconds_and_tokens_are_the_same_throughput():
    """The 176B model on 384 GPUs: 2048 sequences of 2048 tokens in 102.27 s (train/tr11-176B-ml)."""
    row = next(row for row in throughput.rows() if row.id == "smt-122")
    assert row.run.world_size == 384 and row.run.global_batch == 2048
    assert row.measured == pytest.approx(2048 * 2048 / 384 / 102.27)


@pytest.mark.parametrize(
    ("id", "utilisation"),
    [("nanotron-1b-1", 0.4432), ("nanotron-3b-16", 0.3459), ("nanotron-8b-1", 0.4522), ("nanotron-80b-8", 0.3065),
     ("nanotron-80b-64", 0.1779), ("aleph-13b-tp1-pp2", 0.5553),
     ("aleph-13b-8k-tp2-pp4", 0.4988), ("aleph-65b-tp8-pp8", 0.2884), ("nemo2209-5b-32-tp4-pp4", 123.03 / 312),
     ("nemo2209-175b-256-tp8-pp8", 168.98 / 312)],
)  # fmt: skip
def test_a_published_utilisation_is_that_of_the_row(id, utilisation):
    """6 FLOP per parameter and whole attention, over 989 TFLOP/s in nanotron's figure, which counts a tied embedding
    twice in a pipeline, and over 312 in the sheets of arXiv 2311.05610 and in NeMo's TFLOP/s."""
    row = next(row for row in throughput.rows() if row.id == id)
    model, nanotron = lab.model(row.model), id.startswith("nanotron")
    twice = model.vocab * model.hidden if nanotron and model.tied and row.run.pp > 1 else 0
    flops = 6 * (model.parameters + twice) + 12 * model.layers * model.hidden * row.run.seq_len
    assert row.measured * flops / (989e12 if nanotron else 312e12) == pytest.approx(utilisation, rel=0.005)


def test_errors_count_what_is_unknown_and_what_the_interval_holds():
    row = throughput.rows()[0]
    rate = row.measured
    found = [
        (row, throughput.Predicted(None)),
        (row, throughput.Predicted(1.1 * rate, 0.9 * rate, 1.2 * rate)),
        (row, throughput.Predicted(0.6 * rate, 0.5 * rate, 0.7 * rate)),
        (row, throughput.Predicted(1.2 * rate)),
    ]
    got = throughput.errors(found)
    assert (got.rows, got.known, got.inside) == (4, 3, 0.5)
    assert got.median == pytest.approx(0.2) and got.worst == pytest.approx(0.4)


def test_rows_have_the_steps_of_their_sources():
    """InternEvo's tables hold tokens per GPU and step (train_performance.md), bigscience's chronicle sequences."""
    smaller = {"evo-ckpt-mb4-512", "evo-ckpt-mb2-1024", "evo-tp1-one-1024"}
    for row in throughput.rows():
        run = row.run
        if row.source.startswith("internevo") and row.id not in smaller:
            assert run.global_batch * run.seq_len / run.world_size == 16384, row.id
        if row.source == "bigscience-176b":
            assert (run.global_batch, run.world_size) == (2048, 384), row.id
