"""The loop agrees with torch's schedules and clipping; a run learns; a saved model loads in transformers."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import llmlab as lab
from llmlab.course.architectures.gpt import GPT
from llmlab.course.architectures.llama import Llama
from llmlab.course.techniques.training_loop import (
    SMALL_GPT,
    SMALL_LLAMA,
    Recipe,
    adamw,
    evaluate,
    learning_rate,
    main,
    next_token_loss,
    save,
    train,
)
from llmlab.data import split

TINY = {**SMALL_LLAMA, "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4}  # fmt: skip
SHORT = Recipe(steps=40, micro_batch=4, seq_len=32, learning_rate=1e-2, warmup=5, eval_every=20, eval_batches=2)


@pytest.fixture(scope="module")
def text():
    return split(300)


def tiny(seed=0):
    torch.manual_seed(seed)
    return Llama.from_spec(TINY)


def test_the_loss_falls_on_text_that_was_held_out(text):
    history = train(tiny(), *text, SHORT)
    assert [step for step, _ in history.evaluations] == [0, 20, 40]
    before, _, after = (loss for _, loss in history.evaluations)
    assert before == pytest.approx(math.log(300), abs=0.3)
    assert after < before - 1, "a third of a nat below a guess would be the frequencies of letters alone"
    assert history.tokens == 40 * 4 * 32 and len(history.losses) == len(history.grad_norms) == 40


def test_the_same_seed_is_the_same_run_and_another_is_not(text):
    short = replace(SHORT, steps=6)
    first, again = (train(tiny(), *text, short).losses for _ in range(2))
    assert first == again
    assert train(tiny(), *text, replace(short, seed=1)).losses != first


def test_the_loop_is_torchs_with_its_own_schedule_and_clipping(text):
    """The same steps written with torch's schedulers, on the same batches: the same weights."""
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

    from llmlab.data import windows

    recipe = replace(SHORT, steps=12, clip=0.5)
    ours, theirs = tiny(), tiny()
    history = train(ours, *text, recipe)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    rise = LinearLR(optimizer, start_factor=1 / 5, total_iters=4)
    fall = CosineAnnealingLR(optimizer, T_max=12 - 5, eta_min=1e-3)
    schedule = SequentialLR(optimizer, [rise, fall], milestones=[4])
    for step in range(12):
        ids = windows(text[0], 4, 32, seed=step)
        logits = theirs(ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:])
        assert loss.item() == pytest.approx(history.losses[step], rel=1e-4)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in theirs.parameters()]).norm()
        assert norm.item() == pytest.approx(history.grad_norms[step], rel=1e-3)
        for p in theirs.parameters():
            p.grad *= min(1, 0.5 / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert max(history.grad_norms) > 0.5, "or nothing was clipped"
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_the_rate_rises_in_a_line_and_falls_in_a_cosine():
    recipe = Recipe(steps=100, warmup=10, learning_rate=2.0, final=0.1)
    rates = [learning_rate(step, recipe) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert rates[54] == pytest.approx(1.1), "half way down in the middle"
    assert rates[99] == pytest.approx(0.2)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_the_loss_is_the_models_of_transformers(text):
    config = {**TINY, "bos_token_id": None, "eos_token_id": None}
    theirs = AutoModelForCausalLM.from_config(lab_config(config))
    ids = text[0][:64].view(2, 32)
    expected = theirs(input_ids=ids, labels=ids).loss
    assert next_token_loss(theirs(ids).logits, ids).item() == pytest.approx(expected.item(), rel=1e-5)


def lab_config(config):
    from transformers import AutoConfig

    return AutoConfig.for_model(**config)


def test_norms_and_biases_are_not_decayed():
    model = GPT.from_spec({**SMALL_GPT, "n_embd": 32, "n_layer": 1})
    decayed, spared = adamw(model, Recipe()).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all("ln_" in names[id(p)] or "bias" in names[id(p)] for p in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_evaluation_changes_nothing_and_drops_nothing_out(text):
    model = GPT.from_spec({**SMALL_GPT, "vocab_size": 300, "n_embd": 32, "n_layer": 1, "resid_pdrop": 0.5})
    model.train()
    assert evaluate(model, text[1], SHORT) == evaluate(model, text[1], SHORT)
    assert model.training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("config", [TINY, {**TINY, "tie_word_embeddings": False}, {**SMALL_GPT, "n_layer": 1}])
def test_what_is_saved_is_read_by_transformers(config, tmp_path):
    ours = (GPT if config is not TINY and config["model_type"] == "gpt2" else Llama).from_spec(config).eval()
    save(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-4)


def test_the_command_trains_and_writes_a_small_file(tmp_path, capsys):
    main(["--steps", "2", "--warmup", "1", "--eval-batches", "1", "--device", "cpu", "--out", str(tmp_path)])
    assert "nats per held-out token" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").stat().st_size < 6e6
    model = Llama.from_transformers(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert model.spec.parameters == lab.model(SMALL_LLAMA).parameters
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == model.spec.vocab


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"warmup": 360}, {"seq_len": 1}, {"eval_every": 0}, {"warmup": -1}])
def test_a_recipe_that_cannot_be_is_refused(wrong):
    with pytest.raises(lab.SpecError):
        Recipe(**wrong)
