"""The drawings of evaluation show the passes and the counts that they are given."""

from llmlab.course.evaluate.perplexity import windows
from llmlab.course.figures.evaluation import draw_outcomes, draw_windows, plot_positions, plot_questions


def test_windows_name_their_passes_and_their_context():
    alt = draw_windows(16, 8, {stride: windows(16, 8, stride) for stride in (7, 2)}).alt
    assert "stride 7: 3 passes, at least 1 token of context" in alt
    assert "stride 2: 5 passes, at least 6 tokens of context" in alt


def test_the_questions_needed_are_told_with_the_benchmarks():
    alt = plot_questions([1, 2], {"paired": [3917, 981]}, {"MMLU": 14042}).alt
    assert "paired: 3,917 at 1, 981 at 2" in alt and "MMLU 14,042" in alt


def test_the_loss_is_told_by_position():
    assert "4.45 around 4, 3.93 around 12" in plot_positions([0, 8, 16], [4.45, 3.93]).alt


def test_outcomes_name_the_answers_that_flip():
    counts = {(True, True): 40, (True, False): 8, (False, True): 4, (False, False): 48}
    assert "2 bits: 8 lost, 4 won, of 100" in draw_outcomes({"2 bits": counts}).alt


def test_outcomes_without_flips():
    counts = {(True, True): 1, (True, False): 0, (False, True): 0, (False, False): 0}
    assert "0 lost, 0 won, of 1" in draw_outcomes({"same": counts}).alt
