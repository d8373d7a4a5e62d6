"""Notes on a run over several ranks."""

from dataclasses import replace

import pytest

import llmlab as lab

GPT = {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 256, "vocab_size": 2000}
SMALL = lab.Training(micro_batch=2, seq_len=128)


def test_the_report_says_which_engine_ran_and_what_it_does_not_know():
    run = replace(SMALL, dp=4, dp_replicate=2, zero=3, precision="mixed-bf16", accumulation=2)
    report = lab.simulate(GPT, run, "A100-80GB")
    codes = [note.code for note in report.notes]
    assert codes == ["engine", "sharded-copies", "mixed-precision", "gradient-sync", "nccl"]
    assert report.step_seconds and report.mfu and report.flops


def test_more_ranks_than_experts_is_said_since_torch_then_divides_them_by_their_number():
    experts = {"model_type": "mixtral", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
               "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 500, "num_local_experts": 4,
               "num_experts_per_tok": 2, "max_position_embeddings": 128}  # fmt: skip
    few, many = (lab.simulate(experts, replace(SMALL, zero=3, dp=ranks), "A100-80GB") for ranks in (4, 8))
    one_each = 2 * 3 * 64 * 96 * 4  # bytes of an expert's three matrices, in two layers
    rest = [report.parts["weights"] - one_each for report in (few, many)]
    assert rest[1] == pytest.approx(rest[0] / 2, rel=0.1)
    assert [any(note.code == "few-experts" for note in report.notes) for report in (few, many)] == [False, True]


def test_nccl_is_in_the_process_where_somebody_read_it_and_said_to_be_missing_elsewhere():
    run, a100 = lab.Training(seq_len=64, zero=3, dp=2), lab.gpu("A100-80GB")
    read, unread = lab.simulate(GPT, run, a100), lab.simulate(GPT, run, "H100-80GB")
    assert a100.nccl == 1485 * 2**20
    assert read.process == read.peak_reserved + a100.context + a100.nccl
    assert any(note.code == "nccl" and "1.45 GiB" in note for note in read.notes)
    assert unread.process is None and any(note.code == "nccl-unknown" for note in unread.notes)
    alone = lab.simulate(GPT, lab.Training(seq_len=64), a100)
    assert alone.process == alone.peak_reserved + a100.context and not any("nccl" in note.code for note in alone.notes)
    assert a100.room(1) - a100.room(2) == a100.nccl
