"""BLEU equals sacrebleu and ROUGE equals rouge-score, on the awkward cases and on random text."""

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from llmlab.base.errors import SpecError
from llmlab.course.evaluate import bleu, rouge
from llmlab.course.evaluate.bleu import words

AWKWARD = [
    ("the cat sat on the mat", "the cat sat on the mat"),
    ("the the the the the the the", "the cat is on the mat"),  # clipping: a word counts as often as a reference has it
    ("", "an empty hypothesis"),
    ("a", "a"),  # shorter than any bigram
    ("a b c", "a b c"),  # shorter than four words: no 4-gram at all
    ("Hello, world!", "hello world"),
    ("It costs $3,500.50 (U.S.), i.e. 10-12 %.", "It costs $3,500.50 (US), i.e. 10 - 12 %."),
    ("Tom &amp; Jerry said &quot;no&quot;", 'Tom & Jerry said "no"'),
    ("A line-\nbroken word\nand a new line  ", "A linebroken word and a new line"),
    ("naïve café — “quoted” … 東京", "naive cafe - quoted ... 東京"),
    ("good morning everyone today is fine", "entirely other words stand in this one"),
    ("\ttabs\tand   spaces ", "tabs and spaces"),
    ("x_y [z] {w} ~q `r` a/b c:d;e", "x_y [z] {w} ~q `r` a/b c:d;e <skipped>"),
]
PIECES = ["a", "b", "c", "the", "cat,", "mat.", "3.5", "10-12", "don't", "U.S.", "&amp;", "é", "\n", "-", ",7", "7,"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map(" ".join)
# few words and many lines: which of equally long subsequences is taken then decides ROUGE-Lsum
SUMMARIES = TEXTS | st.text("abc \n", max_size=24).map(lambda text: " ".join(text))
KINDS = ["rouge1", "rouge2", "rouge3", "rougeL", "rougeLsum"]


@pytest.mark.parametrize(("hypothesis", "reference"), AWKWARD)
def test_sentence_bleu_is_sacrebleus(hypothesis: str, reference: str) -> None:
    assert float(bleu(hypothesis, reference)) == pytest.approx(
        sacrebleu.corpus_bleu([hypothesis], [[reference]]).score, abs=1e-9
    )


def test_corpus_bleu_is_sacrebleus_and_not_the_mean_of_its_sentences() -> None:
    ours = bleu([h for h, _ in AWKWARD], [r for _, r in AWKWARD])
    theirs = sacrebleu.corpus_bleu([h for h, _ in AWKWARD], [[r for _, r in AWKWARD]])
    assert float(ours) == pytest.approx(theirs.score, abs=1e-9)
    assert list(ours.matches) == theirs.counts
    assert list(ours.totals) == theirs.totals
    assert ours.precisions == pytest.approx(theirs.precisions)
    assert ours.brevity_penalty == pytest.approx(theirs.bp)
    assert abs(float(ours) - sum(float(bleu(h, r)) for h, r in AWKWARD) / len(AWKWARD)) > 1


def test_several_references_give_the_nearest_length_and_each_ngram_from_any() -> None:
    hypotheses = ["the cat sat", "it is a guide to action which ensures"]
    references = [["the cat", "a cat sat on it"], ["it is a guide to action that", "which ensures that it is"]]
    theirs = sacrebleu.corpus_bleu(hypotheses, [list(column) for column in zip(*references, strict=True)])
    ours = bleu(hypotheses, references)
    assert float(ours) == pytest.approx(theirs.score, abs=1e-9)
    assert (ours.length, ours.reference_length) == (theirs.sys_len, theirs.ref_len)


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=4))
def test_bleu_is_sacrebleus_on_random_text(corpus: list[tuple[str, str, str]]) -> None:
    hypotheses = [h for h, _, _ in corpus]
    theirs = sacrebleu.corpus_bleu(hypotheses, [[r for _, r, _ in corpus], [r for _, _, r in corpus]])
    assert float(bleu(hypotheses, [list(refs) for _, *refs in corpus])) == pytest.approx(theirs.score, abs=1e-9)


@given(TEXTS)
def test_words_are_mteval_13as(text: str) -> None:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    assert words(text) == Tokenizer13a()(text.rstrip()).split()


@pytest.mark.parametrize(
    ("hypotheses", "references"),
    [([], []), (["a"], []), (["a", "b"], ["a"]), (["a"], "a"), (["a"], [[]])],
    ids=["empty corpus", "no references", "too few references", "one text for a list", "an empty list"],
)
def test_bleu_refuses_what_does_not_pair_up(hypotheses: list[str], references: object) -> None:
    with pytest.raises(SpecError, match="give"):
        bleu(hypotheses, references)


@pytest.mark.parametrize(("prediction", "target"), AWKWARD)
def test_rouge_is_rouge_scores(prediction: str, target: str) -> None:
    theirs = RougeScorer(KINDS).score(target, prediction)
    ours = rouge(prediction, target, KINDS)
    for kind in KINDS:
        assert tuple(ours[kind]) == pytest.approx(tuple(theirs[kind])), kind


@given(SUMMARIES, SUMMARIES)
def test_rouge_is_rouge_scores_on_random_text(prediction: str, target: str) -> None:
    theirs = RougeScorer(KINDS).score(target, prediction)
    for kind, score in rouge(prediction, target, KINDS).items():
        assert tuple(score) == pytest.approx(tuple(theirs[kind])), kind


def test_rouge_l_sees_the_order_that_rouge_1_does_not() -> None:
    scores = rouge("the gunman killed police", "police killed the gunman")
    assert scores["rouge1"].fmeasure == 1
    assert scores["rougeL"].fmeasure == 0.5


def test_rouge_refuses_an_unknown_kind() -> None:
    with pytest.raises(SpecError, match="rouge0"):
        rouge("a", "a", ["rouge0"])
