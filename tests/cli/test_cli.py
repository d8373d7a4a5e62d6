"""The command line says what the API says, in options made from the same fields, and one line when it cannot."""

import json
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from llmlab import __version__, estimate
from llmlab.archive import PLAN, records
from llmlab.base import errors
from llmlab.base.errors import SpecError
from llmlab.cli import main as cli
from llmlab.cli import options as cli_options
from llmlab.cli.in_options import in_options
from llmlab.hardware.doctor import doctor
from llmlab.hardware.gpu import gpus
from llmlab.hardware.links import cluster, links
from llmlab.report import Report
from llmlab.specs.model import model, models
from llmlab.specs.run import Inference, LoRA, Training
from llmlab.specs.stacks import Torchtitan

TINY = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128,
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def call(*words):
    return CliRunner().invoke(cli.cli, [str(word) for word in words])


def refused(*words):
    """Run a command that cannot be answered; return its one line."""
    result = call(*words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("llmlab: ") and result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


# ---- options and fields are the same


def parsed(*words):
    """Return the run that `llmlab estimate MODEL *words` asks for."""
    command = cli.cli.commands["estimate"]
    return cli_options.run_from(command.make_context("estimate", ["gpt2", *words]))


def test_every_field_is_an_option_and_every_option_of_a_run_is_a_field():
    names = {option.name for option in cli_options.spec_options()}
    of_lora = {"lora" if f.name == "rank" else f"lora_{f.name}" for f in fields(LoRA)}
    assert names == {f.name for f in (*fields(Training), *fields(Inference))} | of_lora | {"inference", "config"}
    assert set(cli_options.HELP) == names - {"inference", "config"}


def test_no_options_are_the_dataclasses_defaults_but_for_the_precision():
    assert replace(parsed(), precision="fp32") == Training()
    assert parsed("--inference") == Inference()
    assert parsed("--lora", "16").lora == LoRA()


T4, A100 = ["--gpu", "T4"], ["--gpu", "A100-80GB"]


@pytest.mark.parametrize(("words", "precision"), [
    ([], "autocast-bf16"), (A100, "autocast-bf16"), (T4, "autocast-fp16"), (["--gpu", "V100"], "autocast-fp16"),
    (["--gpu", "cpu"], "fp32"), (["--lora", "8"], "bf16"), ([*T4, "--lora", "8"], "fp16"),
    ([*T4, "--lora", "8", "--quantization", "nf4"], "autocast-fp16"), ([*T4, "--precision", "fp32"], "fp32"),
    ([*A100, "--stack", "torchtune"], "bf16"), ([*A100, "--stack", "megatron", "--dp", "2"], "mixed-bf16"),
])  # fmt: skip
def test_without_a_precision_a_run_is_in_what_the_gpu_computes_fast(words, precision):
    assert parsed(*words).precision == precision


@pytest.mark.parametrize(("words", "dtypes"), [
    ([], ("bf16", "bf16")), (T4, ("fp16", "fp16")), (["--weights", "fp32"], ("fp32", "fp32")),
    ([*T4, "--weights", "nf4"], ("nf4", "fp16")), (["--gpu", "cpu"], ("bf16", "bf16")),
    (["--kv", "int8"], ("bf16", "int8")),
])  # fmt: skip
def test_without_dtypes_a_generation_is_in_half_precision(words, dtypes):
    run = parsed("--prompt-len", "8", *words)
    assert (run.weights, run.kv) == dtypes


def test_options_of_a_generation_ask_for_one(tmp_path):
    for name in ("batch", "prompt_len", "new_tokens"):
        assert parsed("--" + name.replace("_", "-"), "2") == replace(Inference(), **{name: 2})
    (tmp_path / "zero.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1}))
    assert parsed("--from", str(tmp_path / "zero.json")).precision == "fp32"  # as the file says


@pytest.mark.parametrize("owner", [Training, Inference])
def test_the_default_an_option_shows_is_the_fields(owner):
    options = {option.name: option for option in cli_options.spec_options()}
    for field in fields(owner):
        assert field.default is not MISSING
        if field.name != "lora":  # a rank or nothing: what it makes is tested below
            nothing = field.default is None and "One of none" in options[field.name].help
            assert options[field.name].default == ("none" if nothing else field.default), field.name


def allowed(name):
    """Return the values that an option names in its help, as text; of a number, nothing."""
    (option,) = (option for option in cli_options.spec_options() if option.name == name)
    return option.help.partition("One of ")[2].rstrip(".").split(", ") if "One of " in option.help else []


@pytest.mark.parametrize("owner", [Training, Inference])
def test_the_values_an_option_names_are_those_the_field_allows(owner):
    named = [field.name for field in fields(owner) if allowed(field.name)]
    assert {"attention", "zero", "kv", "weights", "precision"} & {field.name for field in fields(owner)} <= {*named}
    for name in named:
        with pytest.raises(SpecError) as error:
            owner(**{name: "nothing of the kind"})
        words = ", ".join(allowed(name)).replace("none", "None")
        assert str(error.value).endswith(f"is not one of {words}")


def test_a_stack_is_named_with_its_options():
    assert parsed("--stack", "torchtitan:ac=full").stack == Torchtitan(ac="full")
    assert parsed("--stack", "transformers") == parsed()


# A run that may have a completion must have its length.
WITHOUT_A_DEFAULT = {"lora", "stack", "completion_len", "mean_completion_len"}


@pytest.mark.parametrize("name", sorted({f.name for f in (*fields(Training), *fields(Inference))} - WITHOUT_A_DEFAULT))
def test_an_option_sets_its_field_and_nothing_else(name):
    owner = Training if name in {f.name for f in fields(Training)} else Inference
    default = getattr(owner(), name) if name != "precision" else "autocast-bf16"
    two_ranks, two_shards = ["--dp", "2"], ["--tp", "2"]
    shards = [*two_ranks, "--zero", "3"]
    needs = {"zero": two_ranks, "ep": two_ranks, "expert_imbalance": [*two_ranks, "--ep", "2"],
             "quantization": ["--lora", "16", "--precision", "bf16"],
             "double_quant": ["--lora", "16", "--quantization", "nf4"],
             "half_layers": ["--lora", "16", "--precision", "autocast-bf16"], "sequence_parallel": two_shards,
             "loss_parallel": two_shards, "sync_each_batch": [*shards, "--accumulation", "2"],
             "reduce_dtype": [*shards, "--precision", "mixed-bf16"],
             "dp_replicate": ["--dp", "4", "--zero", "3"], "fp8": ["--compile", "--precision", "bf16"],
             "schedule": ["--pp", "2"], "pixels": ["--images", "1"],
             "reference": ["--method", "dpo"], "teacher": ["--method", "distill"],
             "virtual_stages": ["--pp", "2", "--accumulation", "2"]}  # fmt: skip
    others = needs.get(name, [])
    values = {"zero": 2, "offload": "optimizer", "schedule": "gpipe", "method": "dpo", "reference": "offloaded",
              "teacher": "gpt2"}  # fmt: skip
    flag = "--" + name.replace("_", "-")
    if isinstance(default, bool):
        words, value = [flag.replace("--", "--no-", 1) if default else flag], not default
    else:
        other = [choice for choice in allowed(name) or [2] if choice != default][-1]
        value = values.get(name, other)
        words = [flag, str(value)]
    kind = [] if owner is Training else ["--inference"]
    run, without = parsed(*kind, *others, *words), parsed(*kind, *others)
    assert getattr(run, name) == value and getattr(without, name) == default
    assert {**run.to_dict(), name: None} == {**without.to_dict(), name: None}


def test_pixels_are_a_number_or_height_and_width():
    assert parsed("--images", "1", "--pixels", "720x1280").pixels == (720, 1280)
    for size in ("large", "1x2x3"):
        refused = call("estimate", "gpt2", "--images", "1", "--pixels", size)
        assert refused.exit_code == 2 and "HEIGHTxWIDTH" in refused.stderr


def test_the_options_of_lora_make_one():
    run = parsed("--lora", "8", "--lora-targets", "q_proj, o_proj", "--lora-alpha", "32", "--lora-dropout", "0.1")
    assert run.lora == LoRA(rank=8, targets=("q_proj", "o_proj"), alpha=32, dropout=0.1)


def test_none_can_be_said():
    assert parsed("--checkpointing", "none", "--kernels", "none") == parsed()


def test_help_names_every_option_and_fits_a_terminal():
    text = call("estimate", "--help").output
    for option in cli_options.spec_options():
        assert option.opts[0] in text
    assert max(map(len, text.splitlines())) <= 80


# ---- answers


def test_estimate_prints_the_report_of_the_api():
    result = call("estimate", "gpt2", "--gpu", "T4", "--micro-batch", 4, "--seq-len", 512)
    report = estimate("gpt2", Training(micro_batch=4, seq_len=512, precision="autocast-fp16"), "T4")
    assert result.output == f"{report}\n"
    assert result.exit_code == 0 and report.outcome == "fits"


def test_estimate_takes_a_power_limit():
    words = ("estimate", "gpt2", "--gpu", "H100", "--precision", "bf16", "--micro-batch", 64, "--compile", "--json")
    whole, limited = (json.loads(call(*words, *more).stdout) for more in ((), ("--power", 500)))
    assert limited["step_seconds"] > whole["step_seconds"] and limited["peak_allocated"] == whole["peak_allocated"]
    assert "at 500 of 700 W" in limited["time_sources"]["products"]


def test_an_option_that_is_given_its_default_is_no_default():
    """An 8-bit optimizer is torchtune's own; --optimizer adamw asks for the one with two states in the weights' dtype.
    --checkpointing none is torchtitan's ac=none; it has no fp32 over several GPUs."""
    words = ("estimate", "meta-llama/Llama-2-7b-hf", "--gpu", "A100-80GB", "--seq-len", 512, "--json")
    own, asked = (json.loads(call(*words, "--stack", "torchtune", *more).stdout)
                  for more in ((), ("--optimizer", "adamw")))  # fmt: skip
    assert (own["run"]["optimizer"], asked["run"]["optimizer"]) == ("adamw-8bit", "adamw")
    assert asked["peak_allocated"] == pytest.approx(50.2 * 2**30, rel=0.01)
    titan = (*words, "--stack", "torchtitan", "--dp", 8)
    assert json.loads(call(*titan, "--checkpointing", "none").stdout)["run"]["checkpointing"] is None
    assert "--precision fp32 with --dp 8" in refused(*titan, "--precision", "fp32")


def test_json_is_the_report():
    words = ("estimate", "gpt2", "--gpu", "T4", "--precision", "autocast-fp16", "--lora", 8, "--lora-targets", "c_attn")
    run = Training(precision="autocast-fp16", lora=LoRA(rank=8, targets=("c_attn",)))
    assert Report.from_json(call(*words, "--json").stdout) == estimate("gpt2", run, "T4")


def test_inference_is_estimated_too():
    words = ("--batch", 4, "--weights", "fp16", "--kv", "fp16", "--prompt-len", 512)
    result = call("estimate", "gpt2", "--gpu", "T4", "--inference", *words, "--json")
    run = Inference(batch=4, prompt_len=512, weights="fp16", kv="fp16")
    assert Report.from_json(result.stdout) == estimate("gpt2", run, "T4")


def test_vs_shows_a_second_run_with_the_first_ones_other_options():
    words = ("estimate", "meta-llama/Llama-3.1-8B", "--gpu", "H100-80GB", "--dp", "8", "--seq-len", "2048")
    done = call(*words, "--vs", "--zero 3 --checkpointing full", "--json")
    first, second = (Report.from_dict(report) for report in json.loads(done.stdout)["reports"])
    run = Training(precision="autocast-bf16", dp=8, seq_len=2048)
    assert (first.run, second.run) == (run, replace(run, zero=3, checkpointing="full"))
    assert done.exit_code == 1 and second.outcome == "fits"  # the exit code is the first run's
    text = call(*words, "--vs", "--gpu H200").stdout
    assert "estimated, H100-80GB" in text and "estimated, H200" in text and "times as long" in text


def test_a_config_file_is_a_model(tiny):
    result = call("estimate", tiny, "--gpu", "T4", "--seq-len", 128, "--json")
    assert result.exit_code == 0, result.stderr
    # 512·64 + 128·64 + 2 (12·64² + 13·64) + 2·64 parameters, 4 bytes each
    assert json.loads(result.stdout)["parts"]["weights"] >= 4 * (512 * 64 + 128 * 64 + 2 * (12 * 64**2 + 13 * 64) + 128)


def test_exit_codes_are_fits_does_not_fit_and_could_not_say():
    assert call("estimate", "gpt2", "--gpu", "T4").exit_code == 0
    assert call("estimate", "meta-llama/Llama-3.1-8B", "--gpu", "A100-80GB", "--seq-len", 4096).exit_code == 1
    too_near = call("estimate", "gpt2", "--gpu", "T4", "--micro-batch", 7, "--precision", "fp32", "--json")
    assert too_near.exit_code == 2 and "near-limit" in [note["code"] for note in json.loads(too_near.stdout)["notes"]]
    without_a_card = call("estimate", "gpt2")
    assert without_a_card.exit_code == 2 and "peak allocated" in without_a_card.stdout and without_a_card.stderr == ""


def test_measure_measures(tiny):
    result = call("measure", tiny, "--seq-len", 64, "--json")
    report = Report.from_json(result.stdout)
    assert (report.source, report.run) == ("measured", Training(seq_len=64))  # a CPU trains in fp32
    assert report.peak_allocated > 4 * report.run.seq_len and report.environment["torch"]
    assert result.exit_code == cli.EXIT[report.outcome]


def test_compare_holds_the_estimate_to_the_record():
    adapted = [r for r in records(gpu="T4") if isinstance(r.run, Training) and r.run.quantization and r.peak_allocated]
    first = min(adapted, key=lambda r: r.peak_allocated)
    words = []
    for field in fields(Training):
        value = getattr(first.run, field.name)
        if field.name == "lora" and value:
            words += ["--lora", value.rank, "--lora-targets", ",".join(value.targets), "--lora-dropout", value.dropout]
            words += ["--lora-alpha", value.alpha] if value.alpha else []
        elif value is True:
            words += ["--" + field.name.replace("_", "-")]
        elif value != field.default:
            words += ["--" + field.name.replace("_", "-"), value]
    result = call("compare", first.model, "--gpu", "T4", "--json", *words)
    data = json.loads(result.stdout)
    assert [report["source"] for report in data["reports"]] == ["estimated", "simulated", first.source]
    assert data["reports"][-1]["peak_allocated"] == first.peak_allocated and "estimated" in data["relative_errors"]
    assert result.exit_code == cli.EXIT[first.outcome]
    stages = call("compare", "gpt2", "--gpu", "T4", "--pp", 2, "--accumulation", 2)  # of which none is simulated
    assert stages.output.startswith(f"{model('gpt2').name} on T4")


MANY = ("meta-llama/Llama-3.1-8B", "--gpu", "H100-80GB", "--dp", 32, "--zero", 3, "--precision", "mixed-bf16")


def test_the_options_of_a_cluster_make_one():
    run = Training(dp=32, zero=3, precision="mixed-bf16")
    nodes = cluster("H100-80GB", "Ethernet-100", gpus=4, adapters=2, inside="PCIe-5")
    words = ("--network", "ethernet-100", "--gpus-per-node", 4, "--adapters", 2, "--link", "PCIe-5")
    report = Report.from_json(call("estimate", *MANY, *words, "--json").stdout)
    assert report == estimate(MANY[0], run, "H100-80GB", nodes) != estimate(MANY[0], run, "H100-80GB")
    assert [note for note in report.notes if note.code == "interconnect" and "PCIe-5, 2 × Ethernet-100" in note]
    own = Report.from_json(call("estimate", *MANY, "--link-gb-s", 120, "--json").stdout)
    assert own == estimate(MANY[0], run, "H100-80GB", cluster("H100-80GB", reached=120e9))
    assert own.step_seconds > 1.1 * estimate(MANY[0], run, "H100-80GB").step_seconds
    slow = Report.from_json(call("estimate", *MANY, "--network-gb-s", 30, "--json").stdout)
    assert slow == estimate(MANY[0], run, "H100-80GB", cluster("H100-80GB", reached_across=30e9))
    one_node = call("estimate", *MANY[:3], *MANY[-2:], "--dp", 2, "--gpus-per-node", 2, "--json")
    assert json.loads(one_node.stdout)["step_seconds"] > 0


def test_compare_takes_the_cluster_and_measures_when_asked(tiny, monkeypatch):
    monkeypatch.setattr(cli.verbs, "compare", lambda *given, **named: seen.append((given, named)) or 1 / 0)
    seen = []
    call("compare", tiny, "--measure")
    call("compare", tiny, "--gpu", "T4", "--network", "Ethernet-25")
    assert [named for _, named in seen] == [
        {"measure": True, "cluster": None},
        {"measure": False, "cluster": cluster("T4", "Ethernet-25")},
    ]


def test_what_was_measured_decides_over_what_was_predicted():
    def report(source, outcome):
        return Report(source=source, model="m", run=Training(), outcome=outcome, citation="c")

    order = [report("estimated", "fits"), report("published", "out of memory"), report("measured", "unknown")]
    assert cli.best_outcome(order) == "out of memory"
    assert cli.best_outcome(order[:1]) == "fits" and cli.best_outcome(order[2:]) == "unknown"


def test_gpus_lists_every_card_with_its_dense_peaks():
    lines = call("gpus").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [card.name for card in gpus()]
    t4 = lines[1 + [card.name for card in gpus()].index("T4")].split()
    assert t4[3:] == ["8.1", "–", "65", "–", "–", "130", "–", "7.5"]  # fp16 65 TFLOP/s, no bf16, int8 130 TOP/s, sm_75
    cards = json.loads(call("gpus", "--json").stdout)
    assert {card["name"]: card["memory"] for card in cards} == {card.name: card.memory for card in gpus()}
    assert next(card for card in cards if card["name"] == "T4")["peak_flops"]["fp16"] == 65e12


def test_models_lists_every_model_with_its_shape():
    lines = call("models").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == models()
    (gpt2,) = (line.split() for line in lines if line.startswith("gpt2 "))
    assert gpt2 == ["gpt2", "124M", "12", "768", "12/12", "1,024"]
    assert next(line.split() for line in lines if line.startswith("meta-llama/Llama-3.1-8B "))[4] == "32/8"
    listed = {entry["name"]: entry for entry in json.loads(call("models", "--json").stdout)}
    assert listed["gpt2"]["parameters"] == 124_439_808
    assert listed["meta-llama/Llama-3.1-8B"] | {"layers": 32, "kv_heads": 8} == listed["meta-llama/Llama-3.1-8B"]


def test_records_lists_what_was_measured():
    reports = records(gpu="T4")
    assert len(call("records", "--gpu", "T4").stdout.splitlines()) == 1 + len(reports)
    assert [Report.from_dict(data) for data in json.loads(call("records", "--gpu", "T4", "--json").stdout)] == reports
    assert call("records", "huggyllama/llama-65b", "--gpu", "RTX-5090").stdout.count("\n") == 1


def test_doctor_says_what_this_machine_has():
    result = call("doctor")
    assert result.exit_code == 0 and result.stdout == f"{doctor()}\n"
    assert json.loads(call("doctor", "--json").stdout) == doctor().to_dict()


def test_record_measures_within_its_budget_and_says_what_is_left(tmp_path):
    words = ("record", "--budget", 1e-9, "--out", tmp_path, "--allow-cpu", "--json")
    result = call(*words)
    answer = json.loads(result.stdout)
    assert result.exit_code == 0 and answer["measured"] == [] and not list(tmp_path.rglob("*.json"))
    assert answer["left"] + len(answer["skipped"]) == len(PLAN) and answer["left"] > 0
    assert f"{answer['left']} left" in result.stderr and f"{answer['left']} left" in call(*words[:-1]).stdout


# ---- bad input: one line that says what to do, exit code 2, nothing on stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate", "gpt3", "--gpu", "T4"], ["unknown model 'gpt3'", "gpt2"]),
        (["estimate", "gpt2", "--gpu", "A1000"], ["unknown GPU 'A1000'", "A100"]),
        (["estimate", "gpt2", "--gpu", "T4", "--seq-len", "2048"], ["2048", "1024 positions"]),
        (["estimate", "gpt2", "--gpu", "T4", "--micro-batch", "0"], ["--micro-batch 0", ">= 1"]),
        (["estimate", "gpt2", "--gpu", "T4", "--lora-targets", "c_attn"], ["--lora-targets needs --lora"]),
        (["estimate", "gpt2", "--gpu", "T4", "--lora", "8", "--lora-targets", ","], ["--lora-targets ''"]),
        (["estimate", "gpt2", "--batch", "4", "--micro-batch", "4"], ["--batch", "--micro-batch"]),
        (["estimate", "gpt2", "--inference", "--zero", "2"], ["--zero", "--inference"]),
        (["estimate", "gpt2", "--new-tokens", "8", "--lora", "2"], ["--lora", "--new-tokens"]),
        (["estimate", "gpt2", "--kv", "fp8", "--from", "zero3.json"], ["zero3.json", "--kv"]),
        (["estimate", "gpt2", "--micro-batch", "two"], ["--micro-batch", "'two'"]),
        (["estimate", "gpt2", "--lora-alpha", "x", "--lora", "2"], ["--lora-alpha", "'x'"]),
        (["estimate", "gpt2", "--micro-bach", "2"], ["--micro-bach", "--micro-batch"]),
        (["estimate"], ["MODEL"]),
        (["estimat", "gpt2"], ["estimat", "estimate"]),
        (["records", "--gpu", "T44"], ["unknown GPU 'T44'", "T4"]),
        (["records", "--source", "guessed"], ["guessed", "measured"]),
        (["record", "--budget", "0"], ["budget", "above 0"]),
        (["record", "--only", "cooking"], ["cooking", "memory-anatomy"]),
        (["measure", "gpt2", "--device", "tpu"], ["tpu", "cuda"]),
        (["measure", "gpt2", "--dp", "8", "--zero", "3"], ["--dp 8"]),
        (["estimate", "~nobody-of-that-name/x"], ["~nobody-of-that-name/x", "config.json"]),
        (["records", "foo"], ["unknown model 'foo'", "llmlab models"]),
        (["compare", "gpt2", "--gpu", "T4", "--measure"], ["--measure", "--gpu T4", "one of the two"]),
        (["estimate", "gpt2", "--gpu", "T4", "--network", "infiniband"], ["'infiniband'", "Nearest: InfiniBand-"]),
        (["compare", "gpt2", "--gpu", "T4", "--link", "nvlink"], ["unknown link 'nvlink'", "Nearest: NVLink-"]),
        (["estimate", "gpt2", "--gpu", "T4", "--network", "PCIe-4"], ["does not connect nodes", "Ethernet-10"]),
        (["estimate", "gpt2", "--gpu", "T4", "--adapters", "0"], ["--adapters 0", ">= 1"]),
        (["estimate", "gpt2", "--gpus-per-node", "8"], ["--gpus-per-node", "no --gpu"]),
        (["estimate", "gpt2", "--vs", "full"], ["--vs 'full'", "--zero 3"]),
        (["estimate", "gpt2", "--vs", "--dp '2"], ["--vs", "No closing quotation"]),
        (["estimate", "gpt2", "--vs", "--vs '--dp 2'"], ["two runs"]),
        (["estimate", "gpt2", "--power", "500"], ["--power needs --gpu"]),
        (["estimate", "gpt2", "--gpu", "H100", "--power", "nan"], ["--power nan W for H100-80GB", "350", "700"]),
    ],
)
def test_bad_input_is_one_line_that_says_what_was_given_and_what_is_allowed(words, said):
    line = refused(*words)
    for part in said:
        assert part in line, line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps({**TINY, "n_head": 7}), ["64", "7"]),
        ("{", ["JSON"]),
    ],
)
@pytest.mark.parametrize("verb", ["estimate", "measure"])
def test_a_config_that_cannot_be_is_one_line(verb, text, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    line = refused(verb, path, *(["--gpu", "T4"] if verb == "estimate" else []))
    for part in [*said, str(path) if "JSON" in said else ""]:
        assert part in line, line


def test_a_config_that_is_not_text_or_cannot_be_read_is_one_line(tmp_path):
    binary = tmp_path / "model.json"
    binary.write_bytes(b"\x80\x81\xff\x00")
    assert str(binary) in refused("estimate", binary)
    assert str(tmp_path / "none" / "config.json") in refused("estimate", tmp_path / "none" / "config.json")
    (tmp_path / "folder.json").mkdir()
    refused("estimate", tmp_path / "folder.json")


def test_a_bug_is_not_dressed_up_as_bad_input():
    group = type(cli.cli)("llmlab")

    @group.command()
    def broken():
        raise ZeroDivisionError

    assert isinstance(CliRunner().invoke(group, ["broken"]).exception, ZeroDivisionError)


def test_an_interrupt_is_130_and_an_unreadable_file_names_itself():
    group = type(cli.cli)("llmlab")

    @group.command()
    def interrupted():
        raise KeyboardInterrupt

    @group.command()
    def unreadable():
        Path("/no/such/file").read_text()

    result = CliRunner().invoke(group, ["interrupted"])
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "llmlab: interrupted")
    result = CliRunner().invoke(group, ["unreadable"])
    assert (result.exit_code, result.stderr) == (2, "llmlab: /no/such/file: No such file or directory\n")


def test_a_bare_call_shows_help_and_the_version_can_be_asked():
    assert call().exit_code == 0 and "estimate" in call().stdout
    assert call("--version").stdout == f"llmlab {__version__}\n"


@pytest.mark.parametrize(("words", "first", "others"), [
    (["estimate", "gpt2", "--batch-size", "8"], "--micro-batch", ["--batch (for generation)"]),
    (["estimate", "gpt2", "--max-seq-len", "8"], "--seq-len", ["--prompt-len (for generation)"]),
    (["serve", "gpt2", "--prompt-length", "8"], "--prompt-len", []), (["plan", "gpt2", "--batch-size", "8"],
                                                                     "--global-batch", []),
])  # fmt: skip
def test_an_option_that_begins_a_generation_is_not_suggested_for_a_step(words, first, others):
    suggested = refused(*words).partition("Did you mean ")[2].rstrip("?\n").split(" or ")
    assert suggested[0] == first and {*others} <= {*suggested}


@pytest.mark.parametrize(("words", "said"), [
    (["--quantization", "nf4"], ["--quantization nf4", "--lora 16"]),
    (["--zero", "3"], ["--zero 3", "--dp 2 or more", "--zero 0"]),
    (["--pixels", "1000x4"], ["--pixels 1000x4 with --images 0", "give --images 1 or more"]),
    (["--dp", "2", "--zero", "2", "--no-sync-each-batch"], ["--no-sync-each-batch", "--accumulation 1"]),
    (["--lora", "-1"], ["--lora -1"]), (["--offload", "all"], ["--offload all", "none"]),
    (["--fp8", "rowwise", "--precision", "bf16"], ["--fp8 rowwise with no --compile"]),
    (["--method", "dpo", "--reference", "adapter"], ["--reference adapter", "give --lora,", "--reference kept"]),
])  # fmt: skip
def test_an_error_names_options_and_not_the_fields_of_python(words, said):
    line = refused("estimate", "Qwen/Qwen2.5-0.5B", "--gpu", "H100-80GB", *words)
    assert all(part in line for part in said) and not re.search(r"\w=|lab\.", line), line


def test_a_call_stays_as_it_is_and_a_stack_is_named_with_its_options():
    text = "give --assume 1 (lab.simulator(..., assume=1.0)) or steps=2"
    assert in_options(text, cli.cli.commands["run"]) == text.replace("steps=2", "--steps 2")
    stack = "stack=Megatron(virtual_pipeline=1), which sets virtual_stages=1"
    given = "--stack megatron:virtual_pipeline=1, which sets --virtual-stages 1"
    assert in_options(stack, cli.cli.commands["estimate"]) == given


def test_a_note_names_options_and_json_the_fields():
    words = ("estimate", "gpt2", "--gpu", "T4", "--lora", 8, "--lora-targets", "c_attn", "--precision", "autocast-fp16")
    assert "--half-layers all" in call(*words).stdout
    (note,) = [n for n in json.loads(call(*words, "--json").stdout)["notes"] if n["code"] == "frozen-in-fp32"]
    assert "half_layers='all'" in note["text"]


@pytest.mark.parametrize("words", [
    ("explain", "gpt2", "--gpu", "T4", "--latex", "--json"), ("fix", "--gpu", "T4"), ("fix", "--dp", "2"),
    ("plan", "gpt2", "--gpus", "T4", "--global-batch", "4", "--force"),
    ("solve", "gpt2", "--gpu", "T4", "--for", "seq-len", "--seq-len", "64"),
    ("serve", "gpt2", "--gpu", "H100", "--users", "4", "--launch"),
    ("serve", "gpt2", "--gpu", "H100", "--users", "4", "--frontier"),
    ("serve", "gpt2", "--gpu", "H100", "--frontier", "--rate", "3"),
    ("serve", "gpt2", "--gpu", "H100", "--launch", "--slo", "ttft=1s,tpot=30ms", "--rate", "3"),
    ("serve", "gpt2", "--gpu", "8xH100", "--slo", "ttft=1s,tpot=30ms", "--rate", "3"),
    ("serve", "gpt2", "--gpu", "H100", "--tp", "2", "--slo", "ttft=1s,tpot=30ms", "--rate", "3"),
])  # fmt: skip
def test_an_option_that_would_be_ignored_is_refused(words):
    assert "--" in refused(*words)


@pytest.mark.parametrize("words", [
    ("plan", "gpt2", "--gpus", "T4"), ("plan", "gpt2", "--global-batch", "8"), ("solve", "gpt2", "--gpu", "T4"),
    ("simulate", "gpt2"), ("run", "train.py"),
])  # fmt: skip
def test_an_option_that_is_missing_comes_with_an_example(words):
    option, value = refused(*words).partition("For example: ")[2].split()
    assert option in cli.EXAMPLES and value


def test_an_unknown_network_is_not_answered_with_links_inside_a_node():
    known = {across: {link.name for link in links().values() if (link.kind == "network") == across}
             for across in (True, False)}  # fmt: skip
    for option, across in (("--network", True), ("--link", False)):
        line = refused("estimate", "gpt2", "--gpu", "T4", option, "foo")
        named = {*line.partition("Give one of ")[2].rstrip(".\n").split(", ")}
        assert named == known[across] and f"unknown {option.strip('-')} 'foo'" in line


def test_no_option_shows_two_defaults():
    for command in cli.cli.commands.values():
        for option in command.params:
            if isinstance(option, click.Option) and "efault:" in (option.help or ""):
                assert not option.show_default, option.name


# ---- as a program


def program(*words, **options):
    return subprocess.run([sys.executable, "-m", "llmlab", *words], capture_output=True, text=True, **options)


def test_as_a_program_an_estimate_is_printed_whole_and_imports_no_torch():
    done = program("estimate", "gpt2", "--gpu", "T4", env={**os.environ, "COLUMNS": "20"})
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == f"{estimate('gpt2', Training(precision='autocast-fp16'), 'T4')}\n"
    code = (
        "import sys; from click.testing import CliRunner; from llmlab.cli.main import cli; "
        "CliRunner().invoke(cli, ['estimate', 'gpt2', '--gpu', 'T4']); CliRunner().invoke(cli, ['gpus']); "
        "CliRunner().invoke(cli, ['models']); print({'torch', 'transformers', 'matplotlib', 'numpy'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_as_a_program_bad_input_is_one_line_on_stderr():
    done = program("estimate", "gpt2", "--gpu", "T4", "--precision", "bf16", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("llmlab: T4 has no bf16") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said", "variables"),
    [
        (["measure", "gpt2", "--device", "cuda"], ["cuda"], {}),
        (["record"], ["CUDA GPU", "Colab"], {}),
        (["doctor"], ["LLMLAB_AS=T4 needs a CUDA GPU", "unset LLMLAB_AS"], {"LLMLAB_AS": "t4"}),
        (["doctor"], ["LLMLAB_AS=t44", "unknown GPU"], {"LLMLAB_AS": "t44"}),
    ],
)
def test_cuda_asked_for_where_there_is_none_is_one_line(words, said, variables, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = refused(*words)
    for part in said:
        assert part in line


def test_a_reader_that_has_gone_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "llmlab", "models"], stdout=gone, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_explain_prints_the_formula_of_the_peak(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("LLMLAB_CACHE", str(tmp_path))
    words = ("explain", "gpt2", "--gpu", "T4", "--micro-batch", "4", "--seq-len", "512")
    assert "4 · vocab · S · B" in call(*words).stdout
    assert "4 V S B" in call(*words, "--latex").stdout
    data = json.loads(call(*words, "--json").stdout)
    assert data["total"] == sum(term["bytes"] for term in data["terms"])


def test_a_terminal_without_the_letters_gets_the_answer_anyway():
    done = program("gpus", env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"})
    assert done.returncode == 0 and "H200" in done.stdout


@pytest.mark.parametrize("words", [
    ("simulate", "gpt2", "--gpu", "T4"), ("measure", "gpt2"), ("plan", "gpt2", "--gpus", "T4", "--global-batch", "8"),
    ("run", "--gpu", "T4", "train.py"),
])  # fmt: skip
def test_without_torch_a_command_names_the_extra_to_install(monkeypatch, words):
    monkeypatch.setattr(errors, "find_spec", lambda package: None)
    message = refused(*words)
    assert "needs torch" in message and "pip install 'llmlab[torch]'" in message


def test_warnings_of_libraries_keep_their_place_and_ours_the_prefix(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import warnings, torch\nwarnings.warn('of the script')\nfloat(torch.randn(1, device='cuda'))\n"
    )
    lines = [line for line in call("run", "--gpu", "T4", script).stderr.splitlines() if line]
    (own,) = [line for line in lines if line.startswith("llmlab: warning: ")]
    assert "placeholder" in own and own.endswith(f"({script}, line 3)")
    assert any(line.endswith("script.py, line 2: UserWarning: of the script") for line in lines)
