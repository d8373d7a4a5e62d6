"""What is a model, in which spellings, and what is refused with which words."""

import json
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from llmlab.base.errors import SpecError, UnknownName
from llmlab.specs.model import ModelSpec, model, models

LLAMA = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    "spelling",
    ["meta-llama/Llama-3.1-8B", "Llama-3.1-8B", " llama-3.1-8b-instruct ", "Meta-Llama-3.1-8b"],
)
def test_names_people_type(spelling):
    assert model(spelling) == model("meta-llama/Llama-3.1-8B")
    assert model(spelling).name == "meta-llama/Llama-3.1-8B"


def test_the_hub_name_of_gpt2():
    assert model("openai-community/gpt2-xl").name == "gpt2-xl"


def test_a_spec_is_its_own_spec_and_cannot_change():
    spec = model("gpt2")
    assert model(spec) is spec
    with pytest.raises(FrozenInstanceError):
        spec.layers = 3
    with pytest.raises(ValueError, match="layers"):  # a size that is not the config's would build another model
        replace(spec, layers=3)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(model("GPT2"))


def test_file_folder_and_dict_are_the_same(tmp_path):
    file = tmp_path / "tiny" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(LLAMA))
    assert model(file) == model(str(file)) == model(file.parent) == model(str(file.parent))
    assert model(file).name == "tiny"
    assert replace(model(LLAMA), name="tiny") == model(file)
    assert model(LLAMA).name == "custom-llama"


def test_a_relative_config_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    assert model("config.json") == model(".") == model(Path())
    assert model(".").name == tmp_path.name


def test_a_changed_preset_does_not_pass_for_it():
    config = {**model("gpt2").config, "_name_or_path": "gpt2"}
    assert model(config).name == "gpt2"
    assert model({**config, "n_layer": 2}).name == "gpt2 (changed)"


def test_the_config_says_nothing_of_dtype_or_foreign_code():
    given = {**LLAMA, "torch_dtype": "bfloat16", "dtype": "float16", "auto_map": {"AutoModel": "x.Y"}}
    assert model(given).config == LLAMA


def test_kv_heads_default_to_heads_only_where_transformers_does():
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert model(without).kv_heads == 8
    assert model({**without, "num_key_value_heads": None}).kv_heads == 8
    with pytest.raises(SpecError, match="lacks 'num_key_value_heads'"):
        model({**without, "model_type": "mistral"})


@pytest.mark.parametrize(
    ("name", "near"),
    [("meta-llama/Llama-3.1-9B", "meta-llama/Llama-3.1-8B"), ("gpt3", "gpt2"), ("smollm2-137m", "SmolLM2-135M")],
)
def test_an_unknown_name_names_the_nearest(name, near):
    with pytest.raises(UnknownName) as caught:
        model(name)
    message = str(caught.value)
    assert repr(name) in message and near in message and "`llmlab models`" in message and "\n" not in message


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "max_position_embeddings", "model_type"],
)  # fmt: skip
def test_a_missing_key_is_named_with_its_file(tmp_path, key):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({k: v for k, v in LLAMA.items() if k != key}))
    with pytest.raises(SpecError, match=f"lacks '{key}'") as caught:
        model(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, 1.5, 64.0, True, "64", None, [64]])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_size_is_a_whole_number_above_zero(key, value):
    with pytest.raises(SpecError) as caught:
        model({**LLAMA, key: value})
    assert f"{key}={value!r} is not a whole number >= 1" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "64 is not divisible by num_attention_heads=7"),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 is not divisible by num_key_value_heads=3"),
        ({"model_type": "llamma"}, "no language model of model_type='llamma'; nearest: llama"),
        ({"model_type": ["llama"]}, "no language model of model_type"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}}, "its own code (auto_map)"),
        ({"model_type": "llava", "text_config": 7}, "text_config=7 is not a config"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not true or false"),
        ({"attention_dropout": 1.5}, "attention_dropout=1.5 is outside 0 <= attention_dropout < 1"),
        ({"hidden_act": 3}, "hidden_act=3 is not a name"),
        ({"head_dim": 0}, "head_dim=0 is not a whole number >= 1"),
        ({"extra": object()}, "only what JSON can"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(change, message):
    with pytest.raises(SpecError) as caught:
        model({**LLAMA, **change})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_given_head_dim_frees_hidden_from_heads_where_transformers_allows_it():
    uneven = {**LLAMA, "model_type": "mistral", "num_attention_heads": 12, "head_dim": 16}
    assert model(uneven).head_dim == 16
    with pytest.raises(SpecError, match="change one of them or give head_dim"):
        model({**uneven, "head_dim": None})
    with pytest.raises(SpecError, match="hidden_size=64 is not divisible"):  # LlamaConfig refuses it either way
        model({**uneven, "model_type": "llama"})


def test_more_experts_a_token_than_experts():
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}
    with pytest.raises(SpecError, match="num_experts_per_tok=5 is more than the 4 experts"):
        model(mixtral)


def test_gpt2_with_cross_attention_is_refused():
    with pytest.raises(SpecError, match="add_cross_attention"):
        model({**model("gpt2").config, "add_cross_attention": True})


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not JSON"), (b"", "is not JSON"), (b"\xff\xfe", "is not JSON"), (b"[1]", "holds a list"),
     (b"[" * 100_000, "is not JSON")],
)  # fmt: skip
def test_a_file_that_is_no_config(tmp_path, content, message):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(SpecError, match=message) as caught:
        model(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_path_without_a_config(tmp_path):
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path / "absent"), "./absent", "absent.json"):
        with pytest.raises(SpecError, match=r"give a config\.json"):
            model(path)


def test_a_text_that_cannot_be_a_path_is_refused_too(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    for empty in ("", "  "):  # not the folder one happens to be in
        with pytest.raises(SpecError, match="an empty text is not a model"):
            model(empty)
    for text, said in (
        ("~nobody-of-that-name/x", r"~nobody-of-that-name/x.*: No such file"),
        ("C:\\models\\mine", r"C:.models.mine.*: No such file"),  # as Windows writes it
        ("./a\0b", r"a\\x00b.*cannot be a path"),
        ("./" + "x" * 5000, "too long"),
    ):
        with pytest.raises(SpecError, match=said):
            model(text)
    with pytest.raises(UnknownName):
        model("x" * 5000)


@pytest.mark.parametrize("thing", [None, 3, object(), ["gpt2"], ModelSpec])
def test_what_is_no_model_at_all(thing):
    with pytest.raises(SpecError, match="is not a model; give a preset's name"):
        model(thing)


def test_one_line_says_what_the_model_is():
    assert str(model("Llama-3.1-8B")) == (
        "meta-llama/Llama-3.1-8B: 8.03B parameters, 32 layers × 4096, 32 heads (8 kv) × 128, MLP 14336, "
        "vocabulary 128256"
    )
    assert "8 experts × 14336, 2 per token (12.9B active)" in str(model("Mixtral-8x7B"))
    assert all("\n" not in str(model(name)) for name in models())


@pytest.mark.parametrize(("typed", "download"), [("nobody/such-a", "nobody/such-a"), ("no such model", "OWNER/NAME")])
def test_a_repository_that_is_not_known_can_be_downloaded_by_its_name(typed, download):
    with pytest.raises(UnknownName, match=f"llmlab models --download {download}`"):
        model(typed)
