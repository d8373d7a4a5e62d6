"""Tests run on one thread: sums then have the same order every time, so results are equal bit for bit on any CPU."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def every_test_on_one_thread(one_thread):
    pass
