"""The figures of the page on fp8 say in their alternative text what they draw."""

from llmlab.course.figures.fp8 import Layer, draw_border


def test_a_layer_is_faster_beyond_the_border():
    layers = [Layer("wide", 8192, 8192, 8192), Layer("narrow", 1024, 1024, 8192), Layer("short", 8192, 8192, 512)]
    alt = draw_border(layers, activation=6, weight=8, limit=0.0085).alt
    assert "a width of 1,412" in alt
    assert "wide (8,192, 8,192): faster; narrow (1,024, 8,192): slower; short (8,192, 512): slower" in alt
    assert Layer("k", 2048, 512, 1).width == 2 / (1 / 2048 + 1 / 512)
