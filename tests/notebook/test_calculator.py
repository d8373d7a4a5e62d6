"""The calculator's answers are the command line's, for every state of its form; what makes no run is a sentence."""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from unittest import mock

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from llmlab.cli import serve
from llmlab.cli.main import cli
from llmlab.notebook import serving_tab
from llmlab.notebook.calculator import answer, form
from llmlab.notebook.plan_tab import UNCONFIRMED
from llmlab.notebook.widget import calculator
from llmlab.planning.confirm import NotSimulated

FORM = form()
NUMBERS = {
    "micro_batch": (1, 64), "accumulation": (1, 8), "seq_len": (1, 8192), "tp": (1, 8), "pp": (1, 4), "cp": (1, 2),
    "ep": (1, 2), "prompt_len": (1, 4096), "output_len": (1, 512), "zero": (0, 3), "concurrency": (1, 64),
    "max_num_seqs": (1, 256), "max_num_batched_tokens": (64, 8192),
}  # fmt: skip


def values(field):
    if field["kind"] == "choice":
        return st.sampled_from(field["options"])
    if field["kind"] == "flag":
        return st.sampled_from(["no", "yes"])
    if field["name"] in ("gpu_memory_utilization", "range_ratio"):
        return st.sampled_from(["0.5", "0.9", "1", "1.1"])
    if field["name"] == "prefix_hit":
        return st.sampled_from(["0.0", "0.5"])
    if field["name"] in ("rate", "max_model_len"):
        return st.just("none")
    if field["name"] == "lora":
        return st.sampled_from(["none", "8", "64"])
    if field["name"] == "lora_targets":
        return st.sampled_from(["q_proj,v_proj", "q_proj, k_proj, v_proj, o_proj"])
    low, high = NUMBERS.get(field["name"], (1, 4))
    return st.integers(low, high).map(str)


def states(kind):
    """States of the form as a reader leaves it: a few of its fields are not as they were."""
    return st.fixed_dictionaries(
        {
            "kind": st.just(kind),
            "model": st.sampled_from([model["name"] for model in FORM["models"]]),
            "gpu": st.sampled_from([card["name"] for card in FORM["gpus"]]),
            "gpus": st.sampled_from(["1", "2", "8", "64"]),
        },
        optional={field["name"]: values(field) for field in FORM[kind]},
    )


def test_a_flag_that_is_set_off_is_said_in_the_lines_to_copy():
    got = answer({**FORM["defaults"], "kind": "training", "gpus": "2", "tp": "2", "loss_parallel": "no"})
    assert "--no-loss-parallel" in got["cli"].split() and "loss_parallel=False" in got["python"]


@dataclass(frozen=True)
class WithFlags(lab.Service):
    eager: bool = False
    warm: bool = True


@pytest.mark.parametrize(("name", "flag", "text"), [("eager", "--eager", "yes"), ("warm", "--no-warm", "no")])
def test_a_flag_of_a_service_works_in_the_form_and_in_the_command(name, flag, text, monkeypatch):
    for module in (serving_tab, serve):
        monkeypatch.setattr(module, "Service", WithFlags)
    monkeypatch.setitem(serving_tab.HELP, "eager", "")
    monkeypatch.setitem(serving_tab.HELP, "warm", "")
    (field,) = (field for field in serving_tab.serving_fields() if field["name"] == name)
    assert field["kind"] == "flag" and field["default"] != text
    state = {**FORM["defaults"], "gpu": "H100-80GB", "kind": "serving", name: text}
    got = serving_tab.serving_answer(state)
    assert got["cli"].split()[-1] == flag and f"{name}={text == 'yes'}" in got["python"]
    group = click.Group()
    serve.add_serve(group, print)
    words = shlex.split(got["cli"])[1:]
    assert json.loads(CliRunner().invoke(group, [*words, "--json"]).stdout) == json.loads(json.dumps(got["report"]))


@pytest.mark.parametrize("kind", ["training", "serving"])
def test_the_form_opens_with_an_answer(kind):
    got = answer({**FORM["defaults"], "kind": kind})
    assert "error" not in got
    assert ("service" if kind == "serving" else "run") in got["report"]


WITHOUT_TORCH = mock.patch("llmlab.simulation.deriving.find_spec", lambda package: None)  # as in a browser


@settings(max_examples=120)
@given(st.one_of(states("training"), states("serving")))
def test_the_lines_to_copy_give_the_same_report(state):
    got = answer(state)
    if "error" in got:
        assert got["error"] and "\n" not in got["error"]
        return
    words = shlex.split(got["cli"])
    assert words[0] == "llmlab"
    with WITHOUT_TORCH:
        done = CliRunner().invoke(cli, [*words[1:], "--json"])
    assert json.loads(done.stdout) == json.loads(json.dumps(got["report"]))
    assert done.exit_code == {"fits": 0, "out of memory": 1, "unknown": 2}[got["outcome"]]
    names: dict = {}
    with WITHOUT_TORCH:
        exec(got["python"].replace("print(", "report = (").replace("import llmlab as lab", ""), {"lab": lab}, names)
    made = names["report"]
    if state["kind"] == "serving":
        assert made.to_dict() == got["report"]
    else:
        assert made == lab.Report.from_dict(got["report"])


@settings(max_examples=40)
@given(st.one_of(states("training"), states("serving")))
def test_a_lever_is_a_click_the_form_gives_its_run(state):
    got = answer(state)
    for lever in got.get("levers", []):
        after = answer({**state, **lever["set"]})
        assert "error" not in after, after
        assert after["least"] < got["least"]


def test_parts_add_up_to_the_peak_and_the_files_are_json():
    got = answer({"model": "gpt2", "gpu": "T4", "gpus": "4", "precision": "mixed-fp16", "zero": "2"})
    assert sum(size for _, size, _ in got["parts"]) == got["peak"]
    assert json.loads(got["configs"]["ds_config.json"])["zero_optimization"]["stage"] == 2


def test_a_pasted_config_is_the_model():
    config = json.dumps(lab.model("gpt2").config)
    assert answer({"model": config, "gpu": "T4"})["peak"] == answer({"model": "gpt2", "gpu": "T4"})["peak"]


def test_a_pipelines_headline_is_of_its_fullest_stage():
    state = {"model": "gpt2", "gpu": "T4", "gpus": "2", "pp": "2", "micro_batch": "8", "accumulation": "2"}
    got = answer(state)
    assert got["least"] > got["peak"]  # the last stage has the logits


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"model": "{"}, "not JSON"),
        ({"model": '{"model_type": "resnet"}'}, "resnet"),
        ({"model": "no/such-model"}, "unknown model"),
        ({"model": "https://huggingface.co/some/model"}, "https://huggingface.co/some/model/resolve/main/config.json"),
        ({"gpu": "T5"}, "Nearest: T4"),
        ({"gpus": "0"}, "gpus=0 is too small"),
        ({"gpus": "-3"}, "gpus=-3 is too small"),
        ({"gpus": "many"}, "gpus='many' is not a whole number"),
        ({"gpus": "4", "tp": "3"}, "4 GPUs cannot be divided"),
        ({"tp": "0"}, "cannot be divided"),
        ({"seq_len": "9" * 5000}, "seq_len"),
        ({"precision": "fp17"}, "fp17"),
        ({"kind": "dreaming"}, "dreaming"),
        ({"quantization": "nf4"}, "without lora"),
    ],
)
def test_what_makes_no_run_is_a_sentence(state, says):
    assert says in answer({**FORM["defaults"], **state})["error"]


def test_a_billion_gpus_have_an_answer():
    assert answer({**FORM["defaults"], "gpus": "1000000000"})["outcome"] in ("fits", "out of memory", "unknown")


def test_the_widget_answers_what_its_page_asks():
    widget = calculator(model="gpt2", gpu="T4", compile=False)
    sent = []
    widget.send = sent.append
    widget._msg_callbacks(widget, {"id": 7, "state": widget.state}, [])
    assert sent == [{"id": 7, "got": answer({"model": "gpt2", "gpu": "T4", "compile": "no"})}]


def test_the_widget_refuses_a_field_it_does_not_have():
    with pytest.raises(lab.SpecError, match="micro_batches is no field of the calculator"):
        calculator(micro_batches=3)


# ---- planning


def test_a_plan_is_that_of_the_command_line_but_for_the_simulations(monkeypatch):
    state = {"kind": "planning", "model": "meta-llama/Llama-3.2-1B", "gpu": "A100-40GB", "gpus": "4",
             "global_batch": "32", "method": "lora", "goal": "smallest", "vary_optimizer": "yes",
             "tokens": "1000000"}  # fmt: skip
    got = answer(state)
    monkeypatch.setattr(lab.verbs, "plan", partial(lab.plan, executor=NotSimulated(UNCONFIRMED)))
    done = CliRunner().invoke(cli, [*shlex.split(got["cli"])[1:], "--json"])
    assert json.loads(done.stdout) == json.loads(json.dumps(got))["report"]
    assert done.exit_code == 0 and len(got["plan"]["rows"]) == len(got["report"]["candidates"]) > 1


def test_a_planned_run_is_a_click_that_shows_the_same_estimate():
    got = answer({"kind": "planning", "gpus": "8", "gpu": "H100-80GB"})
    for row, candidate in zip(got["plan"]["rows"], got["report"]["candidates"], strict=True):
        shown = answer({**FORM["defaults"], "gpu": "H100-80GB", **row["set"]})
        assert shown["report"]["run"] == {"kind": "training", **candidate["run"]}
        assert shown["peak"] == candidate["report"]["peak_allocated"] and shown["outcome"] == "fits"
    assert "no simulation confirmed them" in got["plan"]["footer"]


def test_where_no_plan_is_sure_to_fit_the_page_says_what_would():
    got = answer({"kind": "planning", "gpu": "T4", "gpus": "1"})
    assert got["headline"].startswith("No run on 1xT4 is sure to fit") and not got["report"]["candidates"]
    assert any("A GPU with more memory" in note for note in got["notes"])


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"gpus": "12"}, "give a multiple of 8"),
        ({"gpus": "0"}, "gpus=0 is too small"),
        ({"global_batch": "all"}, "global_batch='all' is not a whole number"),
        ({"global_batch": "0"}, "global_batch=0 is too small"),
        ({"seq_len": "0"}, "seq_len"),
        ({"method": "half"}, "method='half' is not one of"),
        ({"tokens": "-1"}, "tokens=-1 is too small"),
    ],
)
def test_what_makes_no_plan_is_a_sentence(state, says):
    assert says in answer({**FORM["defaults"], "kind": "planning", **state})["error"]


def test_the_calculator_needs_no_torch():
    """A browser has none: whatever answers is imported where torch cannot be."""
    program = ("import sys; sys.modules.update(torch=None, transformers=None); "
               "from llmlab.notebook.calculator import answer, form; "
               "print(answer(form()['defaults'])['headline'])")  # fmt: skip
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr
