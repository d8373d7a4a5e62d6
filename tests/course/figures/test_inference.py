"""The drawings of inference show the seconds and the scores that they are given."""

from llmlab.course.figures.inference import draw_request, draw_scores


def test_a_request_is_drawn_with_its_times():
    alt = draw_request(4096, 1024, 15e9, 0.066, 0.013, "A100-80GB").alt
    assert "15.0 GB" in alt and "66 ms" in alt and "13 ms" in alt


def test_scores_with_and_without_a_cache():
    assert "needs 5 scores; without a cache all 15" in draw_scores(5).alt
