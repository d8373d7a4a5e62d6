"""The capstone: what is predicted is measured, a kill loses nothing but steps, and every launcher trains the same."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.course import capstone, kills
from llmlab.course.architectures.llama import Llama
from llmlab.course.experiments.cluster import place
from llmlab.course.experiments.launchers import environment, free_port
from llmlab.course.inference import generate
from llmlab.data import END_OF_TEXT, corpus
from llmlab.ranks.launch import launch

SCALE = capstone.SCALES["test"]
RECORD = json.loads(capstone.RECORD.read_text(encoding="utf-8"))
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The path of a short piece of the documentation."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(corpus()[kills.PIECE], encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """The folder of a finished run, and its report."""
    folder = tmp_path_factory.mktemp("run")
    return folder, capstone.run(SCALE, capstone.Session(folder), text)


def data_of(folder, text):
    return capstone.prepare(SCALE, capstone.Session(folder), text)


# ---- what is predicted, is measured


def test_what_formulas_predict_is_measured(finished):
    _, report = finished
    predicted, measured = report["predicted"], report["measured"]
    for exact in ("parameters", "parameters of LoRA", "bytes of the KV cache"):
        assert measured[exact] == predicted[exact]
    assert measured["tokens of the text"] == pytest.approx(predicted["tokens of the text"], rel=0.1)
    first = "loss of the first step, nats"
    assert measured[first] == pytest.approx(predicted[first], rel=0.05)
    # Names, shapes and the losses so far are in the file too: 25 kB, whatever the size of the model.
    for name in ("bytes of the checkpoint", "bytes of its checkpoint"):
        assert predicted[name] < measured[name] < predicted[name] + 40_000
    assert measured["bytes of NF4"] == pytest.approx(predicted["bytes of NF4"], abs=6_000)


def test_the_recorded_run_is_of_this_script():
    toy = capstone.SCALES["toy"]
    text = corpus()
    share = RECORD["predicted"]["tokens of the text"] / len(text.encode())
    again = capstone.predict(toy, len(text.encode()), share)
    assert again == pytest.approx(RECORD["predicted"], rel=1e-3)
    assert [len(losses) for losses in RECORD["losses"].values()] == [toy.steps, toy.tuning_steps]


def test_lora_learns_to_answer_and_to_stop():
    exam, ended = RECORD["exam"], RECORD["ended"]
    gap, error = capstone.compare(torch.tensor(exam["pretrained"]), torch.tensor(exam["tuned"]))
    assert gap > 1.96 * error
    questions = len(RECORD["transcript"])
    assert ended["pretrained"] == 0 and ended["Q8_0"] == questions


def test_the_evaluation_tells_two_bits_from_eight():
    windows = {name: torch.tensor(losses) for name, losses in RECORD["windows"].items()}
    for name, seen in (("2 bits", True), ("pairs of tokens", True), ("Q8_0", False)):
        gap, error = capstone.compare(windows[name], windows["tuned"])
        assert (gap > 1.96 * error) == seen, name


def test_a_paired_error_leaves_out_what_both_find_hard():
    hard = torch.tensor([1.0, 2.0, 3.0, 4.0])
    gap, error = capstone.compare(hard + torch.tensor([0.1, 0.3, 0.1, 0.3]), hard)
    assert gap == pytest.approx(0.2) and error == pytest.approx(0.2 / 3**0.5 / 2, rel=1e-4)


# ---- data


def test_every_row_is_read_once_per_epoch_in_another_order_in_each():
    rows, batch = 12, 5
    read = torch.cat([capstone.row_numbers(step, batch, rows, seed=0) for step in range(12)])
    epochs = read.view(5, rows)
    assert all(epoch.sort().values.tolist() == list(range(rows)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 5


def test_tokens_are_packed_without_loss(finished, text):
    folder, _ = finished
    data = data_of(folder, text)
    ids = torch.cat([data.rows.flatten(), data.held_out.flatten()])
    assert data.packed_bytes == 2 * (data.packed_bytes // 2) and len(ids) <= data.packed_bytes // 2
    first = data.tokenizer.decode(data.rows[0].tolist(), skip_special_tokens=False)
    assert corpus(text).startswith(first.split(END_OF_TEXT)[0])
    assert not set(data.lessons) & set(data.exam) and len(data.exam) > 5


def test_only_the_answer_and_the_end_of_text_are_learned(finished, text):
    folder, _ = finished
    data = data_of(folder, text)
    ids, labels = capstone.padded(data.tokenizer, data.lessons[:4], SCALE.tuning.seq_len)
    for row, (question, answer) in zip(labels, data.lessons[:4], strict=True):
        told = data.tokenizer.decode(row[row >= 0].tolist(), skip_special_tokens=False)
        assert f" {answer}{END_OF_TEXT}".startswith(told) and question not in told
    logits = torch.randn(*ids.shape, SCALE.spec.vocab, generator=torch.Generator().manual_seed(0))
    changed = logits.clone()
    changed[:, :-1][labels[:, 1:] < 0] = 7.0
    count = capstone.scored(labels)
    whole = capstone.label_loss(logits, labels, count)
    assert capstone.label_loss(changed, labels, count) == whole
    parts = (slice(0, 1), slice(1, None))  # two ranks with unequally many labels
    mean = sum(capstone.label_loss(logits[part], labels[part], count / 2) for part in parts) / 2
    assert mean.item() == pytest.approx(whole.item(), rel=1e-5)


# ---- killed at any moment

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="only Linux and macOS fork processes")


@forks
def test_kills_at_random_moments_cost_steps_and_nothing_else():
    command = [sys.executable, "-m", "llmlab.course.kills", "--kills", "100"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert not ended.returncode, ended.stderr
    found = json.loads(ended.stdout)
    assert found["kills"] == 100 and found["bit for bit"]
    assert 0 < found["most steps repeated"] <= found["steps between checkpoints"]


@forks
def test_a_write_that_does_not_end_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "checkpoint"
    path.write_text("whole")
    with pytest.raises(KeyError), capstone.whole(path) as unfinished:
        unfinished.write_text("ha")
        raise KeyError
    assert path.read_text() == "whole"
    pid = os.fork()
    if not pid:
        with capstone.whole(path) as unfinished:
            unfinished.write_text("ha")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert path.read_text() == "whole"


class Harm:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    torch.save({"weights": Harm()}, tmp_path / "harm")
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", enabled=False)
    progress = capstone.Progress(model, optimizer, scaler, torch.default_generator)
    with pytest.raises(Exception, match="weights_only"):
        progress.resume(tmp_path / "harm", capstone.Place())


# ---- every launcher


def losses_of_two_ranks(folder):
    return capstone.run(SCALE, capstone.Session(folder, place())).get("losses")


def test_the_files_of_a_plan_start_the_same_run_under_every_launcher(finished, tmp_path):
    pytest.importorskip("deepspeed")
    pytest.importorskip("accelerate")
    run = replace(SCALE.pretraining, micro_batch=1, dp=2)
    lab.write(SCALE.model, run, "2xT4", tmp_path / "plan")
    config = tmp_path / "plan" / "accelerate.yaml"
    config.write_text(config.read_text().replace("use_cpu: false", "use_cpu: true"))
    settings = str(tmp_path / "plan" / "ds_config.json")
    module, port = "llmlab.course.capstone", str(free_port())
    starts = {
        "accelerate": ["accelerate", "launch", "--config_file", str(config), "--main_process_port", port, "-m", module,
                       "--engine", "accelerate"],
        "deepspeed": ["deepspeed", "--num_accelerators", "2", "--master_port", port, "--module", module,
                      "--engine", "deepspeed", "--settings", settings],
    }  # fmt: skip

    def losses(out):
        return json.loads((out / "report.json").read_text())["losses"]["pretrain"]

    capstone.main(["--scale", "test", "--out", str(tmp_path / "alone")])  # as python -m does
    by_ddp = launch(losses_of_two_ranks, 2, tmp_path / "ddp", patience=120)[0]  # torchrun sets what launch sets
    assert by_ddp["pretrain"] == pytest.approx(losses(tmp_path / "alone"), abs=2e-3)
    for name, command in starts.items():
        out = tmp_path / name
        ended = subprocess.run([*command, "--scale", "test", "--out", str(out)], env=environment(), capture_output=True,
                               text=True)  # fmt: skip
        assert not ended.returncode, f"{name}: {ended.stderr[-4000:]}"
        assert losses(out) == pytest.approx(losses(tmp_path / "alone"), abs=2e-3), name


def test_states_that_zero_divides_are_refused():
    model = Llama.from_spec(SCALE.model)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", enabled=False)
    progress = capstone.Progress(model, optimizer, scaler, torch.default_generator)
    with pytest.raises(SpecError, match="ZeRO divides them"):
        capstone.start_engine("deepspeed", progress, capstone.Place(), {"zero_optimization": {"stage": 2}})


# ---- served


def test_the_scheduler_answers_as_one_request_alone_does(finished, text):
    from llmlab.course.quantize.formats.gguf_model import read_llama

    folder, _ = finished
    data = data_of(folder, text)
    model = read_llama(folder / "model-Q8_0.gguf").double()  # a batch rounds otherwise than one request
    prompts = [capstone.prompt(question) for question, _ in data.exam[:3]]
    for asked, request in zip(prompts, capstone.serve(model, data.tokenizer, prompts, 12).requests, strict=True):
        ids = torch.tensor(data.tokenizer.encode(asked).ids)
        alone = generate(model, ids, 12)[len(ids) :].tolist()
        assert request.output == alone[: len(request.output)]


def test_llama_cpp_generates_the_tokens_of_the_scheduler(finished, text):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: it is optional")
    from llmlab.course.quantize.formats.gguf_model import read_llama, write_llama

    folder, _ = finished
    data = data_of(folder, text)
    model = read_llama(folder / "model-Q8_0.gguf")
    write_llama(folder / "whole.gguf", model, data.tokenizer, "F32")
    prompts = [capstone.prompt(question) for question, _ in data.exam[:3]]
    theirs = capstone.llama_cpp_tokens(folder / "whole.gguf", data.tokenizer, prompts, 12)
    assert theirs == [request.output for request in capstone.serve(model, data.tokenizer, prompts, 12).requests]
