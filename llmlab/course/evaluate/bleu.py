"""BLEU: the share of a translation's n-grams that also occur in a reference (Papineni et al. 2002).

BLEU differs by points between tools that split text into words differently, so a BLEU without its tokenizer means
nothing (Post 2018, "A Call for Clarity in Reporting BLEU Scores"). This one is sacrebleu's default: mteval-v13a's
words, n-grams up to 4, exponential smoothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...base.errors import SpecError

MAX_ORDER = 4

# mteval-v13a.pl, the script of the NIST machine-translation evaluations: first entities, then where words are split.
ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))
BREAKS = (
    (re.compile(r"([!-&(-+:-@\[-`{-~/])"), r" \1 "),  # every ASCII punctuation mark but ' , - . is a word
    (re.compile(r"([^0-9])([.,])"), r"\1 \2 "),  # . and , too, except between digits
    (re.compile(r"([.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),  # - only after a digit
)


class Bleu(float):
    """A BLEU score, 0 to 100, with the quantities it is computed from.

    `matches` and `totals` count, for n = 1 to 4, the text's n-grams that a reference has and all of the text's n-grams;
    `precisions` are the quotients in percent, smoothed; `length` and `reference_length` are in words;
    `brevity_penalty` is 1, or less if the text is shorter than the reference.
    """

    matches: tuple[int, ...]
    totals: tuple[int, ...]
    precisions: tuple[float, ...]
    length: int
    reference_length: int
    brevity_penalty: float


def words(text: str) -> list[str]:
    """Split `text` into words as mteval-v13a does.

    >>> words("It costs 3.5, doesn't it?")
    ['It', 'costs', '3.5', ',', "doesn't", 'it', '?']
    """
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, mark in ENTITIES:
        text = text.replace(entity, mark)
    text = f" {text} "
    for pattern, spaced in BREAKS:
        text = pattern.sub(spaced, text)
    return text.split()


def ngrams(tokens: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    """Count the n-grams of length `order`.

    >>> ngrams(["a", "b", "a", "b"], 2)[("a", "b")]
    2
    """
    return Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))


def bleu(hypotheses: Sequence[str] | str, references: Sequence[Any] | str) -> Bleu:
    """Return the corpus BLEU of `hypotheses` against `references`.

    `references[i]` belongs to hypothesis i: one text, or a list of texts, any of which may match an n-gram. Both
    arguments may also be a single text instead of a list. Matches are summed over the corpus before dividing; the mean
    of the sentences' scores is a different number. Raises SpecError for an empty corpus, a missing reference, or lists
    of unequal length.

        BLEU = BP · exp(mean of log p_n, n = 1..4)      BP = min(1, exp(1 - reference_length / length))

    >>> round(bleu("the cat sat on a mat", "the cat sat on the mat"), 2)
    53.73
    >>> float(bleu(["a b c d"], ["a b c d"])) > 99.999
    True
    """
    if isinstance(hypotheses, str):
        hypotheses, references = [hypotheses], [references]
    matches, totals = [0] * MAX_ORDER, [0] * MAX_ORDER
    length = reference_length = 0
    for hypothesis, texts in zip(hypotheses, _reference_lists(hypotheses, references), strict=True):
        written = words(hypothesis)
        allowed = [words(text) for text in texts]
        length += len(written)
        # the length of the reference nearest in length; if two are equally near, of the shorter one
        reference_length += min((abs(len(a) - len(written)), len(a)) for a in allowed)[1]
        for n in range(1, MAX_ORDER + 1):
            most: Counter[tuple[str, ...]] = Counter()
            for reference in allowed:
                most |= ngrams(reference, n)  # for each n-gram, its count in the reference that has it most often
            matches[n - 1] += (ngrams(written, n) & most).total()
            totals[n - 1] += max(len(written) - n + 1, 0)
    return _score(matches, totals, length, reference_length)


def _reference_lists(hypotheses: Sequence[str], references: Sequence[Any] | str) -> list[list[str]]:
    entries = [] if isinstance(references, str) else references
    lists = [[entry] if isinstance(entry, str) else list(entry) for entry in entries]
    if not hypotheses or len(lists) != len(hypotheses) or not all(lists):
        raise SpecError(
            f"{len(hypotheses)} hypotheses and {len(lists)} references, {lists.count([])} of them empty: give at least "
            "one hypothesis, and one reference (a text, or a list of texts) per hypothesis"
        )
    return lists


def _score(matches: list[int], totals: list[int], length: int, reference_length: int) -> Bleu:
    brevity = 1.0
    if length < reference_length:
        brevity = math.exp(1 - reference_length / length) if length else 0.0
    precisions, smoothing = [0.0] * MAX_ORDER, 1
    for n, (match, total) in enumerate(zip(matches, totals, strict=True)):
        if total == 0 or not any(matches):
            break  # no hypothesis has n words, or nothing matches
        if match == 0:
            smoothing *= 2  # method 3 of Chen and Cherry 2014: a half, a quarter, ... of one match
        precisions[n] = 100 * match / total if match else 100 / (smoothing * total)
    complete = min(precisions) > 0
    score = Bleu(brevity * math.exp(sum(math.log(p) for p in precisions) / MAX_ORDER) if complete else 0.0)
    score.matches, score.totals, score.precisions = tuple(matches), tuple(totals), tuple(precisions)
    score.length, score.reference_length, score.brevity_penalty = length, reference_length, brevity
    return score
