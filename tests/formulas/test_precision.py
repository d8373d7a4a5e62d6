"""Bytes per parameter: the numbers every talk on training memory begins with."""

import pytest

from llmlab.formulas.memory.precision import PRECISION, bytes_per_parameter, state_bytes, weight_bytes


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("fp32", "adamw", 4 + 4 + 8),
        ("autocast-bf16", "adamw", 4 + 4 + 8),  # autocast keeps fp32 weights: mixed precision saves no states
        ("mixed-bf16", "adamw", 2 + 2 + 4 + 8),  # ZeRO's 2 + 2 + K, K = 12
        ("bf16", "adamw", 2 + 2 + 4),
        ("fp32", "sgd", 8),
        ("mixed-bf16", "lion", 2 + 2 + 4 + 4),
        ("bf16", "lion", 2 + 2 + 4),  # bitsandbytes' states are fp32
        ("fp32", "adamw-8bit", 8 + 2 + 2 * 4 / 256),
    ],
)
def test_bytes_of_a_trained_parameter(precision, optimizer, expected):
    assert bytes_per_parameter(precision, optimizer) == expected


@pytest.mark.parametrize("kind", ["", "autocast-", "mixed-"])
def test_which_of_the_half_formats_it_is_changes_no_bytes(kind):
    assert PRECISION[f"{kind}fp16"] == PRECISION[f"{kind}bf16"]


def test_nf4_takes_four_bits_and_a_scale_for_64_weights():
    assert weight_bytes("nf4", 64 * 1000, rows=1) * 8 / (64 * 1000) == 4.5


def test_int8_takes_a_byte_and_a_scale_for_each_row():
    assert weight_bytes("int8", 4096 * 4096, rows=4096) == 4096 * 4096 + 4 * 4096


def test_adafactor_keeps_rows_and_columns_only():
    assert state_bytes("adafactor", 4, parameters=4096 * 4096, factored=2 * 4096) == 4 * 8192
