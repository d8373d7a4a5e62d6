"""Batches of sequences of several lengths, padded to their longest one."""

import json
from itertools import combinations, permutations
from math import ceil
from statistics import mean

import pytest
from click.testing import CliRunner

import llmlab as lab
from llmlab.cli.main import cli
from llmlab.planning.lengths import padded, read_lengths

RUN = lab.Training(micro_batch=2, precision="autocast-fp16")
LENGTHS = [100, 150, 200, 1000, 300, 200]


def test_the_share_of_batches_up_to_a_length_is_that_of_all_pairs():
    found = padded("gpt2", RUN, "T4", LENGTHS)
    longest = [max(pair) for pair in combinations(LENGTHS, 2)]
    for batch in found.batches:
        assert batch.shorter == pytest.approx(mean(each <= batch.length for each in longest))
    assert next(batch.length for batch in found.batches if batch.name == "median") == sorted(longest)[len(longest) // 2]


def test_the_worst_batch_is_the_estimate_of_its_longest_sequence():
    found = padded("gpt2", RUN, "T4", LENGTHS)
    alone = lab.estimate("gpt2", lab.Training(micro_batch=2, precision="autocast-fp16", seq_len=1000), "T4")
    assert found.worst.peak_allocated == alone.peak_allocated
    assert (found.longest_fitting, found.longer) == (1000, 0)


def test_too_long_sequences_are_counted_and_met_when_all_orders_say():
    model, run = "meta-llama/Llama-3.2-1B", lab.Training(micro_batch=1, precision="autocast-bf16")
    lengths = [64, 128, 256, 512, 8000, 16_000]
    found = padded(model, run, "A100-40GB", lengths)
    assert (found.longest_fitting, found.longer, found.worst.outcome) == (512, 2, "out of memory")
    first = [min(order.index(8000), order.index(16_000)) + 1 for order in permutations(lengths)]
    assert found.first_update == ceil(mean(first))
    few = padded(model, run, "A100-40GB", [64] * 900 + [16_000])
    assert few.within_trial == pytest.approx(100 / 901)


def test_more_ranks_and_micro_batches_meet_the_first_one_sooner():
    model, lengths = "meta-llama/Llama-3.2-1B", [64] * 1599 + [16_000]
    runs = [lab.Training(micro_batch=1, precision="autocast-bf16", dp=dp, accumulation=more) for dp, more in
            ((1, 1), (4, 1), (4, 2))]  # fmt: skip
    updates = [padded(model, run, "A100-40GB", lengths).first_update for run in runs]
    assert updates == [801, 201, 101]


@pytest.mark.parametrize("text", ["7\n8\n9\n", "[7, 8, 9]", "\ufeff7\r\n8\r\n9\r\n"])
def test_lengths_are_lines_or_json(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path) == [7, 8, 9]


@pytest.mark.parametrize("text", ["", "seven", "1.5", "0\n1", "-3", "[1, 2", '["a"]', "[true]", "[]", "[" * 100_000])
def test_what_is_no_length_is_refused(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(lab.SpecError):
        read_lengths(path)


def test_the_exit_code_is_that_of_the_worst_batch(tmp_path):
    path = tmp_path / "lengths"
    path.write_text("\n".join(map(str, [64, 64, 1000])))
    words = ["estimate", "gpt2", "--gpu", "T4", "--micro-batch", "2", "--lengths", str(path)]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert CliRunner().invoke(cli, [*words, "--micro-batch", "3", "--precision", "fp32", "--json"]).exit_code == 0
    path.write_text("\n".join(map(str, [64, 64, 1000] * 20)))
    answer = CliRunner().invoke(cli, [*words, "--micro-batch", "60", "--json"])
    assert answer.exit_code == 1
    assert json.loads(answer.stdout)["batches"][-1]["length"] == 1000
    assert CliRunner().invoke(cli, [*words, "--seq-len", "512"]).exit_code == 2
    assert CliRunner().invoke(cli, [*words, "--micro-batch", "61"]).exit_code == 2
