"""The harness asks our models what it asks its own, and gets the same answers."""

import math

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from llmlab.base.errors import SpecError
from llmlab.course.architectures.llama import Llama
from llmlab.course.evaluate import perplexity
from llmlab.course.evaluate.harness import HarnessModel, answers, choice_task, evaluate, text_task
from llmlab.course.inference.drafts import Bigram
from llmlab.data import END_OF_TEXT, corpus, tokenizer

TEXTS = ["The if statement is used for conditional execution.", "A list display yields a new list object. " * 12]


@pytest.fixture(scope="module")
def tokens() -> Tokenizer:
    return tokenizer(512)


@pytest.fixture(scope="module")
def theirs(tokens: Tokenizer) -> LlamaForCausalLM:
    from transformers import LlamaConfig

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64, initializer_range=0.3, bos_token_id=0, eos_token_id=0,
        )
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def ours(theirs: LlamaForCausalLM, tokens: Tokenizer) -> HarnessModel:
    return HarnessModel(Llama.from_transformers(theirs), tokens, tokens.token_to_id(END_OF_TEXT))


@pytest.fixture(scope="module")
def tasks() -> list:
    return [text_task("texts", TEXTS), choice_task("endings", corpus()[:30_000], questions=12)]


def test_the_harness_finds_the_same_with_its_own_wrapper_of_transformers(
    ours: HarnessModel, theirs: LlamaForCausalLM, tokens: Tokenizer, tasks: list
) -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)
    reference = evaluate(HFLM(pretrained=theirs, tokenizer=wrapped, device="cpu", max_length=64), tasks)
    scores = evaluate(ours, tasks)
    assert scores["endings"] == reference["endings"]
    # windows are moved by their own rules where a text is longer than one
    assert scores["texts"]["bits_per_byte"] == pytest.approx(reference["texts"]["bits_per_byte"], rel=0.05)
    short = [text_task("short", TEXTS[:1])]
    again = evaluate(HFLM(pretrained=theirs, tokenizer=wrapped, device="cpu", max_length=64), short)["short"]
    assert evaluate(ours, short)["short"] == pytest.approx(again, rel=1e-4)


def test_its_bits_a_byte_are_ours(ours: HarnessModel, tokens: Tokenizer) -> None:
    found = evaluate(ours, [text_task("short", TEXTS[:1])])["short"]
    ids = torch.tensor([ours.eot_token_id, *tokens.encode(TEXTS[0]).ids])
    expected = perplexity(ours.model, ids)
    assert found["bits_per_byte"] == pytest.approx(expected.bits_per(len(TEXTS[0].encode())))
    assert found["word_perplexity"] == pytest.approx(expected.per(len(TEXTS[0].split())))


def test_a_model_that_knows_the_text_chooses_its_ending(tokens: Tokenizer) -> None:
    """A model that copies: six tokens are followed by the one that followed them in the text."""
    text = " ".join(corpus()[:20_000].split())
    ids = torch.tensor(tokens.encode(text).ids)

    follows = {tuple(ids[i : i + 6].tolist()): ids[i + 6].item() for i in range(len(ids) - 6)}

    class Knows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spec = type("Spec", (), {"vocab": 512, "max_positions": 512})()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(*ids_BT.shape, 512)
            for t in range(5, ids_BT.shape[1]):
                logits[0, t, follows.get(tuple(ids_BT[0, t - 5 : t + 1].tolist()), 0)] = 9
            return logits

    task = choice_task("endings", text, questions=20)
    model = HarnessModel(Knows(), tokens, 0)
    knows = evaluate(model, [task])["endings"]["acc_mutual_info"]
    each = answers(model, task, "acc_mutual_info")
    assert knows > 0.6  # chance is 0.25; the text repeats itself
    assert len(each) == 20 and set(each) <= {0.0, 1.0} and sum(each) / 20 == pytest.approx(knows)


def test_to_a_bigram_table_every_context_says_the_same_of_endings_that_begin_alike(
    ours: HarnessModel, tokens: Tokenizer
) -> None:
    table = Bigram(torch.tensor(tokens.encode(corpus()[:30_000]).ids), ours.model.spec)
    model = HarnessModel(table, tokens, 0)
    generator = torch.Generator().manual_seed(0)
    endings = [[7, *torch.randint(512, (n,), generator=generator).tolist()] for n in range(5, 45)]
    after, alone = (model._loglikelihood_tokens([(None, [last], each) for each in endings]) for last in (3, 0))
    gained = {one - other for (one, _), (other, _) in zip(after, alone, strict=True)}
    assert len(gained) == 1  # log p(7 | 3) - log p(7 | 0): the rest is added up without rounding


def test_generation_stops_at_the_first_stop_text(ours: HarnessModel) -> None:
    class Request:
        args = ("The if statement", {"until": [], "max_gen_toks": 12})

    whole = ours.generate_until([Request()])[0]
    assert len(whole) > 3

    class Stopped:
        args = ("The if statement", {"until": [whole[2:4]], "max_gen_toks": 12})

    assert ours.generate_until([Stopped()])[0] == whole.split(whole[2:4])[0]


def test_a_long_context_loses_its_beginning_and_not_its_end(ours: HarnessModel, tokens: Tokenizer) -> None:
    words = tokens.encode("the value of the expression is " * 40).ids
    score, _ = ours._loglikelihood_tokens([(None, words, [7, 8])])[0]
    read = torch.tensor([*words, 7])[-64:]
    logits = ours.model(read[None])[0].double().log_softmax(-1)
    assert score == pytest.approx((logits[-2, 7] + logits[-1, 8]).item())
    assert not math.isnan(score)


def test_all_endings_begin_with_the_same_word_and_the_right_one_follows() -> None:
    text = corpus()[:20_000]
    for row in choice_task("endings", text, questions=12).dataset["test"]:
        assert len({ending.split()[0] for ending in row["endings"]}) == 1
        before, right = row["context"], row["endings"][row["right"]]
        assert any(before + space + right in text for space in (" ", "\n", "\n\n", "\n   "))


def test_a_text_too_short_for_questions_is_refused() -> None:
    with pytest.raises(SpecError, match="at least 100"):
        choice_task("short", "too short")
