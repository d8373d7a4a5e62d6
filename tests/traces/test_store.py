"""How traces are stored."""

import llmlab as lab
from llmlab.traces.kernels import KernelTrace
from llmlab.traces.polynomials import Monomial
from llmlab.traces.store import find, keep
from llmlab.traces.trace import Moment, Term, Trace

WEIGHT = Term((Monomial(4.0, 0, 0),), "weights", "model.layers.*.mlp", "empty")
TRACE = Trace(2, 0, (WEIGHT,), (Moment("forward", "bmm", {0: (2, 1)}),), KernelTrace((), (), ()))


def test_a_trace_is_kept_for_its_range_and_made_anew_if_its_file_is_broken(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMLAB_CACHE", str(tmp_path))
    monkeypatch.setattr("llmlab.traces.store._kept", kept := {})
    spec, card = lab.model("gpt2"), lab.gpu("T4")
    run = lab.Training(micro_batch=2, seq_len=600, precision="fp16")
    assert find(spec, run, card) is None
    keep(spec, run, card, TRACE)
    kept.clear()  # as in another process
    assert find(spec, lab.Training(micro_batch=2, seq_len=1000, precision="fp16"), card) == TRACE
    same = {"micro_batch": 2, "seq_len": 1000, "precision": "fp16"}
    for other in ({"seq_len": 1200}, {"micro_batch": 1}, {"precision": "fp32"}, {"seq_len": 601}, {"micro_batch": 5}):
        assert find(spec, lab.Training(**{**same, **other}), card) is None
    kept.clear()
    (file,) = (tmp_path / "traces").iterdir()
    for broken in ("", "{}", "[]", '{"groups": 1, "fixed": false, "terms": [[0]], "moments": []}', "\x00"):
        file.write_text(broken)
        assert find(spec, run, card) is None
