"""The small trained model: it loads, and is as good as recipe.json says; what is not it is refused."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmlab.base.errors import NotAvailable, SpecError
from llmlab.course.architectures import small
from llmlab.course.architectures.small import (
    FOLDER,
    STRIDE,
    TEXT,
    WINDOW,
    small_ids,
    small_model,
    small_tokenizer,
    stated,
)
from llmlab.course.evaluate import perplexity, small_perplexity
from llmlab.course.techniques.training_loop import SMALL, SMALL_LLAMA, main
from llmlab.data import split, tokenizer


def test_it_has_its_stated_perplexity():
    model = small_model()
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    measured = perplexity(model, small_ids()[1], WINDOW, STRIDE)
    assert measured == pytest.approx(stated()["perplexity"], rel=1e-3)


def test_the_sample_of_all_chapters_is_about_as_hard_as_the_held_out_text():
    found = small_perplexity(small_model())
    assert found.tokens == 2047
    assert found == pytest.approx(38.19, abs=0.05)  # as its docstring says
    assert found == pytest.approx(stated()["perplexity"], rel=0.03)


def test_it_has_learned_more_than_how_often_each_token_comes():
    training, held_out = small_ids()
    counts = torch.bincount(training, minlength=1024) + 1
    unigram = (-(counts / counts.sum()).log()[held_out]).mean().exp()
    assert 4 * stated()["perplexity"] < unigram < 1024


def test_transformers_reads_the_same_model():
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ids = small_ids()[1][None, :64]
    torch.testing.assert_close(theirs(ids).logits, small_model()(ids), rtol=0, atol=1e-4)


def test_it_is_small_and_what_the_recipe_trains():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 6e6
    assert stated()["recipe"] == asdict(SMALL)
    assert stated()["tokens"] == SMALL.steps * SMALL.micro_batch * SMALL.seq_len
    config = small_model().spec.config
    assert {name: config[name] for name in SMALL_LLAMA} == SMALL_LLAMA


def test_its_tokenizer_and_ids_are_those_that_data_makes_of_its_text():
    own = small_tokenizer()
    assert own.get_vocab() == tokenizer(1024, TEXT).get_vocab()
    for ours, theirs in zip(small_ids(), split(1024, TEXT), strict=True):
        assert torch.equal(ours, theirs)
    assert TEXT.read_bytes().decode().endswith(own.decode(small_ids()[1].tolist()))


def test_each_call_gives_a_model_of_its_own():
    first, second = small_model(), small_model()
    with torch.no_grad():
        first.norm.weight.zero_()
    assert second.norm.weight.any()


@pytest.fixture
def copy(tmp_path):
    for name in (small.WEIGHTS, small.CONFIG, small.TOKENIZER, small.RECIPE):
        shutil.copy(FOLDER / name, tmp_path)
    return tmp_path


def test_a_truncated_file_says_so(copy):
    weights = copy / small.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(SpecError, match=r"model\.safetensors .* is truncated, or of another model; reinstall"):
        small_model(copy)


def test_another_models_config_or_tokenizer_says_so(copy):
    config = json.loads((copy / small.CONFIG).read_text())
    (copy / small.CONFIG).write_text(json.dumps({**config, "rope_theta": 1e6}))
    with pytest.raises(SpecError, match=r"config\.json"):
        small_model(copy)
    (copy / small.TOKENIZER).write_text("{}")
    with pytest.raises(SpecError, match=r"tokenizer\.json"):
        small_tokenizer(copy)


@pytest.mark.parametrize("name", [small.WEIGHTS, small.RECIPE])
def test_a_missing_file_says_how_to_get_it(copy, name):
    (copy / name).unlink()
    with pytest.raises(NotAvailable, match=rf"{name} of the small model is not in .* --small"):
        small_model(copy)


def test_a_broken_recipe_says_so(copy):
    (copy / small.RECIPE).write_text('{"sha256":')
    with pytest.raises(SpecError, match="not JSON"):
        small_model(copy)


def test_one_command_trains_it_again_and_states_what_it_got(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(f"{main.__module__}.split", lambda *given: [ids[:2048] for ids in split(*given)])
    main(["--small", "--steps", "2", "--warmup", "1", "--micro-batch", "2", "--eval-batches", "1", "--device", "cpu",
          "--out", str(tmp_path)])  # fmt: skip
    facts = stated(tmp_path)
    assert facts["recipe"] == {**asdict(SMALL), "steps": 2, "warmup": 1, "micro_batch": 2, "eval_batches": 1}
    assert f"held-out perplexity {facts['perplexity']:.4f}" in capsys.readouterr().out
    assert facts["sha256"][TEXT.name] == stated()["sha256"][TEXT.name]
    again = perplexity(small_model(tmp_path), small_ids()[1][:2048], WINDOW, STRIDE)
    assert again == pytest.approx(facts["perplexity"], rel=1e-3)
    assert again > 2 * stated()["perplexity"]
