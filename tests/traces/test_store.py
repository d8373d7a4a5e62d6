"""How traces are stored."""

import llmlab as lab
from llmlab.traces.kernels import KernelTrace
from llmlab.traces.polynomials import Monomial
from llmlab.traces.store import find, has_trace, keep
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


def test_eager_training_whose_memory_is_linear_in_its_layers_has_a_trace():
    assert has_trace(lab.Training()) and has_trace(lab.Training(dp=2, zero=2)) and not has_trace(lab.Inference())
    offloaded = {"precision": "mixed-bf16", "offload": "optimizer"}
    for fields in ({"pp": 2}, {"dp": 2, "zero": 1}, {"compile": True}, {"stack": "litgpt"}, offloaded):
        assert not has_trace(lab.Training(**fields)), fields


def test_where_nothing_can_be_written_a_trace_is_kept_in_the_process_and_another_torch_has_none(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMLAB_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("llmlab.traces.store._kept", {})
    run = lab.Training(seq_len=600)
    spec, card, other = lab.model("gpt2"), lab.gpu("T4"), lab.gpu("A100")
    keep(spec, run, card, TRACE)
    assert find(spec, run, card) == TRACE and find(spec, run, other) is None
    monkeypatch.setattr("llmlab.traces.store._versions", lambda: ["torch 9"])
    assert find(spec, run, card) is None
