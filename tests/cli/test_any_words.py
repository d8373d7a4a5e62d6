"""Whatever words follow a command: an answer, or one line that says what is wrong, and never a traceback."""

import json
from dataclasses import fields

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.cli import main as cli
from llmlab.hardware.gpu import gpus
from llmlab.specs.check import is_derived
from llmlab.specs.model import model, models
from llmlab.specs.run import Inference, Training

ODD = st.one_of(
    st.floats().map(str), st.text(max_size=8),
    st.sampled_from(["", " ", ".", "/", "~nobody/x", "a\0b", "a=b", "{}", "é" * 300, "1e9", "0x10", "१", "auto"]),
)  # fmt: skip
WHOLE = st.sampled_from([1, 2, 3, 8, 64, 1000, 4096, 0, -1, 2**31, 10**9, 10**30])
PARTS = st.sampled_from([0.0, 0.1, 1.0, 1.5, 1e9, 1e300, -0.5, float("nan"), float("inf")])
KNOWN = st.sampled_from([
    "fp32", "fp16", "bf16", "mixed-bf16", "adamw", "sgd", "adafactor", "adamw8bit", "full", "selective", "none",
    "flash", "sdpa", "eager", "nf4", "int8", "optimizer", "parameters", "gpipe", "1f1b", "rowwise", "tensorwise",
    "torchtitan", "megatron:recompute=full", "torchtitan:ac=none", "torchtune", "litgpt", "NVLink", "all-linear",
    "q_proj",
])  # fmt: skip


def words_of(command, without=frozenset()):
    """Up to four options of a command, but those named `without`: each with a value of its kind, or now and then of
    another."""
    found = []
    for option in cli.cli.commands[command].params:
        if not isinstance(option, click.Option) or option.name in {"help", "download", *without}:
            continue  # nothing is downloaded here
        names = st.sampled_from([*option.opts, *option.secondary_opts])
        if option.is_flag:
            found.append(names.map(lambda name: (name,)))
            continue
        kind = KNOWN
        if isinstance(option.type, click.Choice):
            kind = st.sampled_from(list(option.type.choices))
        elif option.name == "gpu":
            kind = st.sampled_from([card.name for card in gpus()])
        elif "int" in option.type.name:
            kind = WHOLE
        elif "float" in option.type.name:
            kind = PARTS
        value = st.integers(0, 11).flatmap(lambda n, kind=kind: ODD if n == 0 else KNOWN if n == 1 else kind)
        found.append(st.tuples(names, value.map(str)))
    return st.lists(st.one_of(found), max_size=4).map(lambda pairs: [word for pair in pairs for word in pair])


FOR_TRAINING = {field.name for field in fields(Training)} | {
    "lora", "lora_alpha", "lora_dropout", "lora_targets", "lora_autocast_adapter_dtype",
}
FOR_INFERENCE = {field.name for field in fields(Inference)} | {"inference"}
TRAINING = words_of("estimate", without=FOR_INFERENCE - FOR_TRAINING)
SERVING = words_of("estimate", without=FOR_TRAINING - FOR_INFERENCE)
ENGINE = words_of("serve", without={"slo", "rate", "concurrency"})  # the replays of large loads take minutes
MODELS = st.one_of(st.sampled_from([name for name in models() if not is_derived(model(name), Training())]), ODD)
CALLS = st.one_of(
    st.tuples(st.just("estimate"), MODELS, words_of("estimate")).map(lambda call: [call[0], call[1], *call[2]]),
    TRAINING.map(lambda words: ["estimate", "Qwen/Qwen2.5-0.5B", "--gpu", "H100-80GB", *words]),
    TRAINING.map(lambda words: ["estimate", "meta-llama/Llama-3.1-8B", "--seq-len", "64", "--dp", "8", *words]),
    TRAINING.map(lambda words: ["estimate", "mistralai/Mixtral-8x7B-v0.1", "--gpu", "A100-80GB", *words]),
    SERVING.map(lambda words: ["estimate", "Qwen/Qwen2.5-0.5B", "--inference", "--json", *words]),
    st.tuples(st.sampled_from(["gpus", "models", "records"]), st.lists(ODD, max_size=2)).map(
        lambda call: [call[0], *call[1]]
    ),
    st.tuples(st.sampled_from(["gpt2", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"]), ENGINE).map(
        lambda call: ["serve", call[0], *call[1]]
    ),
    words_of("records").map(lambda words: ["records", *words]),
    st.lists(ODD, max_size=3),
)


@settings(max_examples=300)
@given(CALLS)
def test_any_words_are_answered_or_refused_in_a_line(words):
    result = CliRunner().invoke(cli.cli, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exc_info)
    assert result.exit_code in (0, 1, 2), (words, result.exit_code)
    lines = result.stderr.splitlines()
    assert all(line.startswith("llmlab: ") for line in lines), (words, result.stderr)
    if result.exit_code == 2 and lines and not lines[-1].startswith("llmlab: warning"):
        assert not result.stdout, words
    if "--json" in words and result.stdout and "--help" not in words:
        json.loads(result.stdout)


@pytest.mark.parametrize("command", sorted(cli.cli.commands))
def test_every_command_refuses_an_option_that_it_lacks(command):
    result = CliRunner().invoke(cli.cli, [command, "--no-such-option"])
    if command == "run":  # what follows may be the script's
        assert result.exit_code == 2
        return
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "--no-such-option" in result.stderr
