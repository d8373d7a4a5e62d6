"""Kernel times measured by others: what the tables say is physically possible, and they refuse what they cannot say."""

import json

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.hardware import kernel_tables
from llmlab.hardware.kernel_tables import FOLDER, Grid, kernel_table, padding

CARDS = sorted(path.stem for path in FOLDER.glob("*.json"))
KNOWN = [name for name in CARDS if name in {card.name for card in lab.hardware.gpus()}]


@pytest.mark.parametrize("name", CARDS)
def test_interpolation_is_within_five_percent_on_points_left_out(name):
    table = kernel_table(name)
    assert table is not None and table.gpu == name and "Apache-2.0" in table.source
    assert (FOLDER / f"{name}.json").stat().st_size < 300_000
    if "fp8" in table.matmuls:  # cuBLASLt's, which training multiplies with; other frameworks have kernels of their own
        assert [by.split()[0] for by in table.matmuls["fp8"].measured_by] == ["trtllm"]
    for measured in (*table.matmuls.values(), *table.attentions.values()):
        assert measured.left_out["points"] > 100
        assert measured.left_out["median"] <= 0.05


@pytest.mark.parametrize("name", KNOWN)
def test_nothing_is_faster_than_the_data_sheet(name):
    table, card = kernel_table(name), lab.gpu(name)
    assert table.sms == card.sms
    for dtype in table.matmuls:
        peak = card.peak("bf16") * {"bf16": 1, "fp8": 2, "nvfp4": 4}[dtype]
        for m, n, k in ((8192, 8192, 8192), (4096, 14336, 4096), (16384, 6144, 12288)):
            rate = 2 * m * n * k / table.matmul(m, n, k, dtype).seconds
            assert 0.35 * peak < rate < 1.02 * peak  # the clock may be a little above the data sheet's
        moved = 2 * (8192 * 8192) * {"bf16": 1, "fp8": 0.5, "nvfp4": 0.25}[dtype]
        assert table.matmul(1, 8192, 8192, dtype).seconds > 0.3 * moved / card.bandwidth  # a part lies in L2
    causal = 2 * 8 * 32 * 8192**2 * 128
    assert 0.3 * card.peak("bf16") < causal / table.attention(8, 32, 8192, 128).seconds < card.peak("bf16")
    for operation, sent in (("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1), ("all-to-all", 1)):
        found = table.collective(operation, 1 << 29, 8)
        if found and card.nvlink:  # NVLink SHARP adds in the switch, so an all-reduce sends little more than once
            assert 0.4 * card.nvlink < sent * 7 / 8 * (1 << 29) / found.seconds < 1.15 * card.nvlink


def test_a_measured_point_is_given_back_and_one_between_lies_between():
    table = kernel_table("A100-80GB")
    grid = Grid(((1, 4), (2, 8)), (0, 64, 128, 256))
    assert [grid.nanoseconds(p) for p in ((1, 2), (1, 8), (4, 2), (4, 8))] == [1, 2, 4, 16]
    assert grid.nanoseconds((2, 4)) == pytest.approx(2 ** ((0 + 1 + 2 + 4) / 4))
    assert table.matmul(4096, 4096, 4096).seconds < table.matmul(4096, 5000, 4096).seconds
    assert table.matmul(4096, 4096, 4096, "fp16") == table.matmul(4096, 4096, 4096, "bf16")


def test_beyond_what_was_measured_time_grows_with_the_work_and_the_answer_says_so():
    table = kernel_table("H100-80GB")
    last = table.matmuls["bf16"].grid.axes[0][-1]
    end, beyond = table.matmul(last, 4096, 4096), table.matmul(4 * last, 4096, 4096)
    assert (end.inside, beyond.inside) == (True, False)
    assert beyond.seconds == pytest.approx(4 * end.seconds)
    end, beyond = table.attention(1, 32, 16384, 128), table.attention(1, 32, 65536, 128)
    assert (end.inside, beyond.inside) == (True, False)
    assert beyond.seconds == pytest.approx(16 * end.seconds)
    assert table.matmul(64, 64, 16, "bf16").seconds == table.matmul(64, 64, 32, "bf16").seconds  # a launch


def test_what_was_not_measured_is_none():
    assert kernel_table("T4") is None
    table = kernel_table("A100-80GB")
    assert table.matmul(64, 64, 64, "fp8") is None
    assert table.collective("all-reduce", 1 << 20, 16) is None
    assert table.collective("broadcast", 1 << 20, 8) is None


def test_tiles_go_in_whole_waves():
    """One block more than multiprocessors takes a second wave: 12 × 9 = 108 tiles fill an A100, 12 × 10 do not."""
    assert padding((12 * 128, 9 * 256, 64), (128, 256), 108) == 1
    assert padding((12 * 128, 10 * 256, 64), (128, 256), 108) == pytest.approx(216 / 120)
    assert padding((12 * 128, 10 * 256, 64), None, 108) == 1
    table = kernel_table("A100-80GB")
    assert table.matmuls["bf16"].tile == (128, 256)
    one_wave, two = table.matmul(1536, 2304, 4096).seconds, table.matmul(1536, 2560, 4096).seconds
    assert two > 1.5 * one_wave


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.update(schema=2),
        lambda data: data.pop("matmuls"),
        lambda data: data["matmuls"]["bf16"]["values"].pop(),
        lambda data: data["matmuls"]["bf16"]["axes"][0].reverse(),
        lambda data: data["collectives"]["all-reduce"].pop("axes"),
    ],
)
def test_a_corrupt_table_is_refused_by_name(tmp_path, monkeypatch, spoil):
    data = json.loads((FOLDER / "A100-80GB.json").read_text())
    spoil(data)
    (tmp_path / "A100-80GB.json").write_text(json.dumps(data))
    monkeypatch.setattr(kernel_tables, "FOLDER", tmp_path)
    kernel_table.cache_clear()
    with pytest.raises(SpecError, match=r"A100-80GB\.json is no table of kernel times"):
        kernel_table("A100-80GB")
    (tmp_path / "A100-80GB.json").write_text('{"schema": 1, "gpu"')
    with pytest.raises(SpecError, match=r"A100-80GB\.json"):
        kernel_table("A100-80GB")
    kernel_table.cache_clear()


def test_a_card_measured_at_one_head_size_is_at_others_as_much_slower_as_another_that_was_measured_there():
    a100, l40s = kernel_table("A100-80GB"), kernel_table("L40S")
    assert a100.attentions["bf16"].grid.axes[0] == (128,)
    measured, smaller = (a100.attention(8, 32, 2048, size) for size in (128, 64))
    there, as_much = (l40s.attention(8, 32, 2048, size) for size in (128, 64))
    assert smaller.seconds / measured.seconds == pytest.approx(as_much.seconds / there.seconds)
    assert measured.inside and not smaller.inside
    assert 0.5 < smaller.seconds / measured.seconds < 0.75  # half the FLOP, at a lower rate
