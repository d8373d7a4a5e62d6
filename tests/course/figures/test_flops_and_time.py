"""The drawings of the chapter on FLOPs and time show the numbers that they are given."""

from llmlab.course.figures.flops_and_time import (
    Error,
    Work,
    draw_block_flop,
    draw_errors,
    draw_pipes,
    draw_roofline,
    draw_seconds,
)


def test_a_training_step_has_three_times_the_flop_of_the_forward_pass():
    assert "q 6, up 30" in draw_block_flop({"q": 2e6, "up": 10e6}, 6e6).alt


def test_bars_show_their_seconds():
    assert draw_seconds({"matmuls": 2.0, "AdamW": 0.5}, ["matmuls"], "A step").alt == (
        "A step: matmuls 2.00 s, AdamW 0.50 s."
    )


def test_a_kernel_has_a_time_for_its_flop_and_one_for_its_bytes():
    assert "mm 2.00 and 0.50 s; add 0.01 and 4.00 s" in (
        draw_pipes({"mm": Work(200, 5, 2), "add": Work(1, 40, 4)}, rate=100, bandwidth=10).alt
    )


def test_the_ridge_is_that_of_the_last_roof():
    kernels = {"mm": Work(1e13, 1e10, 1.0), "cast": Work(1e10, 1e11, 1.0)}
    alt = draw_roofline(kernels, {"data sheet": (65e12, 320e9), "fitted": (20e12, 200e9)}).alt
    assert "ridge at 100" in alt and "mm 1e+03 FLOP per byte, 10 TFLOP/s" in alt


def test_errors_are_counted_inside_of_their_intervals():
    errors = [Error(10, 5, -10, 20), Error(20, -8, -12, -2), Error(40, 2, -5, 5)]
    alt = draw_errors(errors, "H200").alt
    assert "3 estimated times: median 5 %, at worst 8 %, 2 inside" in alt and "10 to 40 %" in alt
