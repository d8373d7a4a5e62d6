"""`llmlab plan` writes files, reads engines' configs back, and says in one line what cannot be."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from click.testing import CliRunner

from llmlab import Training, verbs
from llmlab.cli.main import cli
from llmlab.planning import confirm

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
# One candidate, so that one simulation answers.
ONE = ["precision=mixed-bf16", "checkpointing=full", "compile=false", "offload=none", "micro_batch=2", "zero=3",
       "dp=2", "dp_replicate=1", "seq_len=64"]  # fmt: skip


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Return what `llmlab plan` of a tiny model answers; it is called in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    real = confirm._pool
    monkeypatch.setattr(confirm, "_pool", lambda _, workers: real(ThreadPoolExecutor(1), workers))  # no new processes
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))

    def ask(*words, gpus="2xA100-80GB", batch=8, fixed=ONE):
        given = ["plan", "tiny.json", "--gpus", gpus, "--global-batch", str(batch)]
        return CliRunner().invoke(cli, [*given, *(part for field in fixed for part in ("--fixed", field)), *words])

    return ask


def test_write_writes_the_best_and_replaces_nothing_without_force(plan, tmp_path):
    done = plan("--write", "out")
    assert done.exit_code == 0 and "Written into out" in done.output, done.output
    out = tmp_path / "out"
    settings = json.loads((out / "ds_config.json").read_text())
    assert (settings["train_batch_size"], settings["zero_optimization"]["stage"]) == (8, 3)
    before = {path.name: path.read_text() for path in out.iterdir() if path.is_file()}
    (out / "train.py").write_text("mine")
    again = plan("--write", "out")
    assert again.exit_code == 2 and "--force" in again.output
    assert (out / "train.py").read_text() == "mine"
    assert {path.name for path in out.iterdir() if path.is_file()} == set(before)
    assert plan("--write", "out", "--force").exit_code == 0
    assert (out / "train.py").read_text() == before["train.py"]


def test_what_was_written_is_asked_about_with_from(plan):
    assert plan("--write", "out", "--json").exit_code == 0
    for name in ("ds_config.json", "accelerate.yaml"):
        words = ["estimate", "tiny.json", "--from", f"out/{name}", "--seq-len", "64", "--gpu", "A100-80GB", "--json"]
        done = CliRunner().invoke(cli, words)
        run = json.loads(done.stdout)["run"]
        assert (run["zero"], run["dp"], run["precision"]) == (3, 2, "mixed-bf16"), done.output


def test_nothing_is_written_where_nothing_fits(plan, tmp_path):
    words = ["plan", "meta-llama/Llama-3.1-8B", "--gpus", "T4", "--global-batch", "8", "--write", "out"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 1 and "Nothing fits." in done.output
    assert not (tmp_path / "out").exists()


def test_a_billion_gpus_are_answered_with_the_reason(plan):
    done = plan(gpus="1000000000xT4", fixed=[])
    assert done.exit_code == 2
    assert "--global-batch 8 sequences and --gpus 1000000000xT4: no number of data-parallel ranks" in done.output


@pytest.mark.parametrize(
    ("fixed", "both"),
    [
        (["dp=3"], ("--fixed dp=3", "--gpus 2xA100-80GB")),
        (["micro_batch=3"], ("--fixed micro_batch=3", "--global-batch 8")),
        (["quantization=nf4"], ("--fixed quantization=nf4", "--method full")),
        (["dp=2", "tp=2", "pp=1", "cp=1"], ("tp=2", "2 GPUs")),
        (["zero=1", "offload=optimizer+parameters", "seq_len=64"], ("zero=3", "zero=1")),
    ],
)
def test_constraints_that_contradict_each_other_are_both_named(plan, tmp_path, fixed, both):
    done = plan("--write", "out", fixed=fixed)
    assert done.exit_code == 2 and "Traceback" not in done.output
    assert len(done.output.strip().splitlines()) == 1
    for name in both:
        assert name in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("run", "changed", "code"), [
    ("fits", [], 0), ("out of memory", ["out of memory", "fits"], 0), ("out of memory", ["unknown", "fits"], 0),
    ("out of memory", ["out of memory"], 1), ("out of memory", [], 1),
    ("unknown", ["unknown"], 2), ("out of memory", ["out of memory", "unknown"], 2),
])  # fmt: skip
def test_fix_returns_whether_the_run_or_a_change_of_it_fits(monkeypatch, run, changed, code):
    answer = verbs.fix("gpt2", Training(precision="autocast-fp16"), "T4")
    levers = [replace(lever, report=replace(lever.report, outcome=outcome))
              for lever, outcome in zip(answer.levers, changed, strict=False)]  # fmt: skip
    answer = replace(answer, report=replace(answer.report, outcome=run), levers=tuple(levers))
    monkeypatch.setattr(verbs, "fix", lambda *_: answer)
    assert CliRunner().invoke(cli, ["fix", "gpt2", "--gpu", "T4"]).exit_code == code
