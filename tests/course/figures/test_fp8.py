"""The figures of the page on fp8 say in their alternative text what they draw."""

import torch

from llmlab.course.figures.fp8 import Layer, draw_border, draw_layer, draw_matmul, draw_ranges
from llmlab.course.techniques.precision import FORMATS


def test_the_ranges_are_those_of_the_formats_and_of_98_percent_of_the_numbers():
    formats = {"E4M3": FORMATS["fp8-e4m3"], "E5M2": FORMATS["fp8-e5m2"]}
    numbers = {"inputs": [torch.full((10,), 2.0), torch.full((10,), 0.25)], "gradients": [torch.full((5,), 2.0**-20)]}
    alt = draw_ranges(formats, numbers).alt
    assert "E4M3 reaches from 2^-9, with full precision from 2^-6, to 2^8.8" in alt
    assert "inputs 2^-2 to 2^1; gradients 2^-20 to 2^-20" in alt


def test_a_layer_is_faster_beyond_the_border():
    layers = [Layer("wide", 8192, 8192, 8192), Layer("narrow", 1024, 1024, 8192), Layer("short", 8192, 8192, 512)]
    alt = draw_border(layers, activation=6, weight=8, limit=0.0085).alt
    assert "a width of 1,412" in alt
    assert "wide (8,192, 8,192): faster; narrow (1,024, 8,192): slower; short (8,192, 512): slower" in alt
    assert Layer("k", 2048, 512, 1).width == 2 / (1 / 2048 + 1 / 512)


def test_the_matmul_sums_in_fp32_and_the_gradient_is_in_e5m2():
    assert "sums in fp32" in draw_matmul().alt
    assert "gradient of the output in E5M2" in draw_layer().alt
