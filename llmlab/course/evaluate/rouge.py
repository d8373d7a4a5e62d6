"""ROUGE: the overlap of a written summary with a reference summary (Lin 2004), as the `rouge-score` package counts it.

ROUGE-N compares n-grams. ROUGE-L compares the longest common subsequence: words in the same order, gaps allowed.
ROUGE-Lsum does so for each pair of lines and unites the words found. Published numbers use lower-cased ASCII words, and
often a Porter stemmer, which is not implemented here (`use_stemmer=False`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ...base.errors import SpecError
from .bleu import ngrams

KINDS = ("rouge1", "rouge2", "rougeL")


class Score(NamedTuple):
    """The matches as a share of the prediction and as a share of the target, and the harmonic mean of the two."""

    precision: float
    recall: float
    fmeasure: float


def rouge(prediction: str, target: str, kinds: Sequence[str] = KINDS) -> dict[str, Score]:
    """Return the Score of one `prediction` against one `target`, for each kind.

    `kinds` are "rouge1" to "rouge9", "rougeL" and "rougeLsum" (one sentence per line); SpecError is raised for others.
    A text without an ASCII letter or digit scores 0.

    >>> rouge("the police killed the gunman", "police killed the gunman")["rougeL"].recall
    1.0
    """
    scores = {}
    for kind in kinds:
        if kind == "rougeLsum":
            scores[kind] = _lines(prediction, target)
        elif kind == "rougeL":
            written, wanted = words(prediction), words(target)
            scores[kind] = _score(len(common_subsequence(wanted, written)), len(written), len(wanted))
        elif re.fullmatch(r"rouge[1-9]", kind):
            n = int(kind[-1])
            written_n, wanted_n = ngrams(words(prediction), n), ngrams(words(target), n)
            scores[kind] = _score((written_n & wanted_n).total(), written_n.total(), wanted_n.total())
        else:
            raise SpecError(f"kind {kind!r}: give 'rouge1' to 'rouge9', 'rougeL' or 'rougeLsum'")
    return scores


def words(text: str) -> list[str]:
    """Return the lower-cased runs of ASCII letters and digits; every other character ends a word.

    >>> words("Don't re-use café")
    ['don', 't', 're', 'use', 'caf']
    """
    return re.findall(r"[a-z0-9]+", text.lower())


def common_subsequence(target: Sequence[str], prediction: Sequence[str]) -> list[int]:
    """Return the indices in `target` of a longest subsequence that `prediction` has too.

    The table's cell (i, j) is the length for the first i and j words. Of equally long subsequences rouge-score's is
    returned: its way back through the table drops a word of the target unless dropping the prediction's keeps more.

    >>> common_subsequence("police killed the gunman".split(), "police kill the gunman".split())
    [0, 2, 3]
    """
    table = [[0] * (len(prediction) + 1) for _ in range(len(target) + 1)]
    for i, wanted in enumerate(target, 1):
        for j, written in enumerate(prediction, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if wanted == written else max(table[i - 1][j], table[i][j - 1])
    places, i, j = [], len(target), len(prediction)
    while i and j:
        if target[i - 1] == prediction[j - 1]:
            i, j = i - 1, j - 1
            places.append(i)
        elif table[i][j - 1] > table[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return places[::-1]


def _lines(prediction: str, target: str) -> Score:
    """Return ROUGE-Lsum (section 3.2): a target line's word counts if it is in the LCS with any prediction line."""
    written = [words(line) for line in prediction.split("\n") if line]
    wanted = [words(line) for line in target.split("\n") if line]
    hits: Counter[str] = Counter()
    for line in wanted:
        hits.update(line[i] for i in {i for other in written for i in common_subsequence(line, other)})
    all_written, all_wanted = (Counter(word for line in lines for word in line) for lines in (written, wanted))
    matches = hits & all_written & all_wanted  # ROUGE-1.5.5 counts no word more often than either text has it
    return _score(matches.total(), all_written.total(), all_wanted.total())


def _score(shared: int, written: int, wanted: int) -> Score:
    precision, recall = shared / max(written, 1), shared / max(wanted, 1)
    both = precision + recall
    return Score(precision, recall, 2 * precision * recall / both if both else 0.0)
