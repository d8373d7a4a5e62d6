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
