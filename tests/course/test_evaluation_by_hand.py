"""What the chapter on evaluation derives by hand: numbers of questions, pass@k, the loss by position, other tools."""

import math
from statistics import NormalDist

import pytest
import torch
from torch.nn.functional import cross_entropy

from llmlab.course.architectures.small import small_ids, small_model, small_sample
from llmlab.course.evaluate.perplexity import perplexity, small_perplexity

FACTOR = (NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)) ** 2


@pytest.mark.parametrize(
    ("variance", "difference", "questions"),
    [
        (0.05 - 0.01**2, 0.01, 3917),
        (0.7 * 0.3 + 0.69 * 0.31, 0.01, 33271),
        (0.05, 0.01, 3925),
        (0.04, 0.005, 12560),
        (0.04, 0.01, 3140),
        (0.01, 0.005, 3140),
        (2 * 0.68 * 0.32, 0.014, 17400),
        (0.1, 0.014, 4000),
        (0.12, 0.04, 589),
        (0.119, 0.03, 1039),
    ],
)
def test_questions_needed(variance, difference, questions):
    assert FACTOR * variance / difference**2 == pytest.approx(questions, rel=5e-3)


def test_smallest_differences_that_164_problems_show():
    assert math.sqrt(FACTOR * 0.32 / 164) == pytest.approx(0.12, abs=0.005)
    assert math.sqrt(FACTOR * 0.1 / 164) == pytest.approx(0.07, abs=0.001)


@pytest.mark.parametrize(("p", "s", "k"), [(0.1, 4, 2), (0.3, 10, 5), (0.8, 6, 6)])
def test_pass_at_k_is_unbiased_and_the_plug_in_is_too_low(p, s, k):
    chances = [math.comb(s, c) * p**c * (1 - p) ** (s - c) for c in range(s + 1)]
    unbiased = sum(w * (1 - math.comb(s - c, k) / math.comb(s, k)) for c, w in enumerate(chances))
    plug_in = sum(w * (1 - (1 - c / s) ** k) for c, w in enumerate(chances))
    assert unbiased == pytest.approx(1 - (1 - p) ** k)
    assert plug_in < unbiased


def test_the_loss_is_level_after_64_tokens():
    model, (_, held_out) = small_model(), small_ids()
    rows = []
    with torch.no_grad():
        for begin in range(0, len(held_out) - 512, 320):
            ids = held_out[begin : begin + 513]
            rows.append(cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none"))
    losses = torch.stack(rows)
    early, middle, late = (losses[:, part].mean() for part in (slice(0, 16), slice(64, 192), slice(192, 512)))
    assert early > middle + 0.3
    assert abs(middle - late) < 0.05


def test_the_stride_of_the_page_is_that_of_the_other_chapters():
    model = small_model()
    assert perplexity(model, small_sample(), 256, 128) == small_perplexity(model)
