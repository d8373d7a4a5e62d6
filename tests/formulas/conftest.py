"""Tests of the written formulas, which answer where nothing is derived: in a browser, in a plan, without torch."""

import pytest

from llmlab.specs import check


@pytest.fixture(autouse=True)
def written(monkeypatch):
    """Derive nothing for a family that has written formulas."""
    monkeypatch.setattr(check, "is_derived", lambda spec, run: not check.has_formulas(spec, run))
