"""Sizes, counts and durations as people read them, also where one rounds up to the next unit."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlab.base.units import GiB, KiB, MiB, show_bytes, show_count, show_digits, show_seconds

UNITS = {"GiB": GiB, "MiB": MiB, "KiB": KiB, "B": 1}
COUNTS = {"T": 10**12, "B": 10**9, "M": 10**6, "k": 1000, "": 1}
SECONDS = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86_400}


def parsed(text):
    """Return the number and the unit of a text without an exponent."""
    number, unit = re.fullmatch(r"([\d,.]+) ?([A-Za-z]*)", text).groups()
    return float(number.replace(",", "")), unit


@given(st.integers(0, 2**50))
def test_bytes_are_below_the_next_unit_after_rounding(size):
    number, unit = parsed(show_bytes(size))
    assert number * UNITS[unit] == pytest.approx(size, rel=0.006, abs=0.5)
    assert unit == "GiB" or number < 1024


@given(st.integers(1, 10**15))
def test_a_count_is_below_the_next_unit_after_rounding(count):
    number, unit = parsed(show_count(count))
    assert number * COUNTS[unit] == pytest.approx(count, rel=0.006)
    assert unit == "T" or number < 1000


@given(st.floats(1e-6, 1e9))
def test_a_duration_has_no_exponent(seconds):
    number, unit = parsed(show_seconds(max(seconds, 1e-4)))
    assert number * SECONDS[unit] == pytest.approx(max(seconds, 1e-4), rel=0.006)
    assert number < {"ms": 1000, "s": 120, "min": 120, "h": 48, "days": 1e9}[unit]


def test_the_values_that_were_shown_with_an_exponent():
    assert show_count(999_885_952) == "1B" and show_seconds(0.9999) == "1 s"
    assert show_digits(13_500, 4) == "13,500" and show_bytes(MiB - 1) == "1.00 MiB"
