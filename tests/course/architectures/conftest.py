"""On one thread sums are in the same order every time: what is asserted bit for bit holds on any number of cores."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def every_test_on_one_thread(one_thread):
    pass
