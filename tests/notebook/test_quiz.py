"""Exercises say right, not yet, or your turn, and never give the answer away."""

from llmlab.notebook.quiz import check_answer, check_function, show_source


def test_a_right_answer_is_within_the_tolerance(capsys):
    assert check_answer(101, 100, "GB") is True
    assert capsys.readouterr().out == "Right: 100 GB.\n"


def test_a_wrong_answer_gets_the_direction_and_the_hint_but_not_the_truth(capsys):
    assert check_answer(50, 123.4, "GB", hint="Count the master copy.") is False
    output = capsys.readouterr().out
    assert "too small" in output and "master copy" in output and "123" not in output


def test_no_answer_asks_for_one(capsys):
    assert check_answer(None, 100, "GB") is False
    assert "Your turn" in capsys.readouterr().out


def test_source_is_shown_from_the_file():
    assert "def show_source" in show_source(show_source).data


FACTS = {"one is two": lambda f: f(1) == 2, "nought stays": lambda f: f(0) == 0}


def test_a_function_is_right_when_every_fact_holds_of_it(capsys):
    assert check_function(lambda n: 2 * n, FACTS) is True
    assert capsys.readouterr().out == "Right: one is two, nought stays.\n"


def test_a_wrong_function_is_told_which_facts_fail_and_nothing_raises(capsys):
    assert check_function(lambda n: 2 / n, FACTS) is False
    said = capsys.readouterr().out
    assert said == "Not yet:\n- one is two: holds\n- nought stays: ZeroDivisionError: division by zero\n"
    assert check_function(lambda n: n + 1, FACTS) is False
    assert "- nought stays: does not hold" in capsys.readouterr().out


def test_a_stub_is_asked_for(capsys):
    def doubled(n):
        raise NotImplementedError

    assert check_function(doubled, FACTS) is False
    assert capsys.readouterr().out == "Your turn: write doubled, and run its cell and this one again.\n"
