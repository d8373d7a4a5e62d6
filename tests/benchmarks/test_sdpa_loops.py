"""Rows of transformers' own loops: which are asked for, and how they are counted. No simulation."""


from benchmarks.memory import sdpa_loops
from benchmarks.memory.sdpa_loops import OOM, Row


def test_a_group_asks_for_its_own_ways_and_leaves_out_what_is_in_doubt():
    groups = sdpa_loops.groups()
    opt = list(sdpa_loops.asked(groups["opt"]))
    assert len(opt) == 2 * 20 - 2 and (4, 2048, "eager", OOM) in opt
    assert not any(tokens == 2048 and way == "sdpa" and batch >= 4 for batch, tokens, way, _ in opt)
    pythia = list(sdpa_loops.asked(groups["pythia"]))
    assert {way for *_, way, _ in pythia} == {"eager"} and len(pythia) == 15


def test_errors_are_of_sizes_and_what_ran_out_of_memory_is_counted_apart():
    said = [("eager", 100.0, 101.0), ("sdpa", 200.0, 190.0), ("eager", OOM, OOM), ("eager", OOM, 300.0),
            ("eager", 100.0, OOM)]  # fmt: skip
    rows = [Row("bert", "1 × 2", *each) for each in said]
    text = sdpa_loops.to_markdown(rows, "made")
    assert "2 rows: median |error| 3.00%, worst -5.0%, 1 within 2%. Of 2 that ran out of memory 1 are" in text
    assert "| eager | 1 × 2 | 100.0 MB | OOM | – |" in text
