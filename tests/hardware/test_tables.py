"""The tables of hardware: their units, their sources and their names."""

import pytest

from llmlab.base.errors import UnknownName
from llmlab.hardware.tables import cited, named, read_table, values_of


def test_a_key_ends_with_its_unit():
    entry = {"rate_gb_s": 2, "memory_gb": 3, "context_mib": 0.5, "step_us": 4, "limit_w": 70, "block_bytes": 9, "n": 1}
    assert values_of(entry, {}) == {
        "rate": 2e9, "memory": 3 * 10**9, "context": 2**19, "step": 4e-6, "limit": 70.0, "block": 9, "n": 1,
    }  # fmt: skip
    table = {"checked": "2026-11-21", "documents": {"ddr": "data sheet"}}
    found = values_of({"source": "[ddr], page 3", "names": ["a", "b"]}, table)
    assert found == {"checked": "2026-11-21", "source": "data sheet, page 3", "names": ("a", "b")}
    with pytest.raises(KeyError, match="nowhere"):
        cited("[nowhere]", {})


def test_an_entry_is_found_in_any_case_and_another_name_names_the_nearest():
    assert named("node", "dgx h100", {"DGX A100": 1, "DGX H100": 2}) == 2
    with pytest.raises(UnknownName, match=r"unknown node 'DGX H10'.*DGX H100"):
        named("node", "DGX H10", {"DGX H100": 2, "HGX": 1})
    assert read_table("nodes.toml") is read_table("nodes.toml")
