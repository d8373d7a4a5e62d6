"""Settings as text: what is written is read back."""

import sys

import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmlab.engines.texts import toml_text, yaml_text

NAMES = st.from_regex(r"[a-z][a-z_]{2,8}", fullmatch=True)
VALUES = st.one_of(st.booleans(), st.integers(-10, 2**40), st.floats(allow_nan=False, allow_infinity=False),
                   st.text(st.characters(min_codepoint=32, max_codepoint=126)), st.lists(st.integers()))  # fmt: skip


@given(st.dictionaries(NAMES, VALUES | st.none() | st.dictionaries(NAMES, VALUES, min_size=1)))
def test_yaml_is_read_back(settings):
    """1e+30 is a number too, which YAML 1.1 reads as text."""
    assert yaml.safe_load(yaml_text(settings)) == (settings or None)


def test_lines_of_text_stay_lines():
    written = yaml_text({"run": "one\ntwo\n", "more": {"setup": "three\nfour"}})
    assert "run: |\n  one\n  two\n" in written
    assert yaml.safe_load(written) == {"run": "one\ntwo\n", "more": {"setup": "three\nfour\n"}}


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES), max_size=3))
def test_toml_is_read_back(sections):
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    assert tomllib.loads(toml_text(sections)) == sections
