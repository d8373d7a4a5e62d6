"""Rows of transformers' own loops: which are asked for, and how they are counted. No simulation."""


from benchmarks.memory import sdpa_loops
from benchmarks.memory.sdpa_loops import OOM


def test_a_group_asks_for_its_own_ways_and_leaves_out_what_is_in_doubt():
    groups = sdpa_loops.groups()
    opt = list(sdpa_loops.asked(groups["opt"]))
    assert len(opt) == 2 * 20 - 2 and (4, 2048, "eager", OOM) in opt
    assert not any(tokens == 2048 and way == "sdpa" and batch >= 4 for batch, tokens, way, _ in opt)
    pythia = list(sdpa_loops.asked(groups["pythia"]))
    assert {way for *_, way, _ in pythia} == {"eager"} and len(pythia) == 15
