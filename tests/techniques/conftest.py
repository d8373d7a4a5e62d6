"""On one thread, and ranks wait for each other as long as a slow machine takes."""

import pytest

from llmlab.techniques import launch as launching


@pytest.fixture(scope="module", autouse=True)
def every_test_on_one_thread(one_thread):
    """Sums are in the same order every time: what is asserted bit for bit holds on any number of cores."""


@pytest.fixture(scope="session", autouse=True)
def patient_ranks():
    """Where a test is not about ranks that hang, the default of ten seconds would be an assertion about time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(launching.launch.__kwdefaults__, "patience", 120.0)
        yield
