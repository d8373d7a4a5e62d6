"""One rank of many: simulated bytes against real processes that gloo joins, and what is refused before any work."""

import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import llmlab as lab
from llmlab.measurement.ranks import measure_ranks
from llmlab.simulation.report import recorded

GPT = {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 256, "vocab_size": 2000}
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 2, "intermediate_size": 352, "vocab_size": 2000,
         "max_position_embeddings": 256}  # fmt: skip
GPT_PARAMETERS = 685_568
SMALL = lab.Training(micro_batch=2, seq_len=128)
TWO_RANKS = [
    (GPT, replace(SMALL, dp=2, precision="mixed-bf16", accumulation=2)),
    (GPT, replace(SMALL, zero=1, dp=2)),
    (GPT, replace(SMALL, zero=2, dp=2, checkpointing="full")),
    (LLAMA, replace(SMALL, zero=3, dp=2, precision="mixed-bf16", accumulation=2)),
    (LLAMA, replace(SMALL, zero=3, dp=2, lora=lab.LoRA(8), checkpointing="full")),
    (GPT, replace(SMALL, zero=3, dp=2, precision="autocast-bf16")),
]
FOUR_RANKS = [
    (LLAMA, replace(SMALL, zero=3, dp=2, tp=2, sequence_parallel=True)),
    (LLAMA, replace(SMALL, zero=3, dp=4, dp_replicate=2, precision="mixed-bf16", accumulation=2)),
]


@pytest.mark.parametrize("cases", [TWO_RANKS, FOUR_RANKS], ids=["2 ranks", "4 ranks"])
def test_a_simulated_rank_takes_what_a_real_one_takes(cases):
    for (model, run), measured in zip(cases, measure_ranks(*cases, limit=600), strict=True):
        # Where ranks hold the same, one may show more: a thread of gloo's frees last and unseen (DDP's first buckets).
        alike = run.tp > 1 or not run.zero
        real = min(measured, key=lambda report: report.peak_allocated) if alike else measured[0]
        simulated = lab.simulate(model, run, "cpu")
        # On busy cores all ranks may. With tp each holds what it gathered or sent a moment longer, 1% of the whole;
        # DDP's first buckets, all gradients, stay where gloo's thread lets go of them after DDP made its next.
        late = 0.05 if run.tp > 1 else 0.0002
        late += 4 * GPT_PARAMETERS / simulated.peak_allocated if run.zero < 2 and run.tp == 1 else 0.0
        for name in ("peak_allocated", "forward", "backward"):
            theirs, ours = (getattr(each, name, None) or each.phases[name] for each in (real, simulated))
            assert -0.0002 <= theirs / ours - 1 <= late, (run, name)
        for part in ("weights", "gradients", "optimizer"):
            assert simulated.parts.get(part, 0) == real.parts.get(part, 0), (run, part)


def test_shards_halve_and_nothing_is_gathered_between_steps():
    run = replace(SMALL, dp=8, zero=3)
    report = lab.simulate(GPT, run, "A100-80GB")
    local = GPT_PARAMETERS * 4 // 8
    assert report.phases["load"] == pytest.approx(local, rel=0.03)  # each tensor rounded up to 512 B, rows to a rank's
    assert report.parts["weights"] == pytest.approx(local, rel=0.03)
    assert report.parts["optimizer"] == pytest.approx(2 * local, rel=0.05)
    assert sum(report.parts.values()) == report.peak_allocated <= report.peak_reserved
    assert set(report.detail["other"]) >= {"gathered parameters", "communication buffers"}


def test_zero_2_keeps_blocks_whole_until_their_backward_and_zero_3_does_not():
    whole, freed = (lab.simulate(GPT, replace(SMALL, dp=8, zero=zero), "A100-80GB") for zero in (2, 3))
    blocks = 2 * (12 * 128 * 128 + 13 * 128) * 4
    assert whole.detail["other"]["gathered parameters"] > blocks
    assert freed.detail["other"]["gathered parameters"] < 0.6 * whole.detail["other"]["gathered parameters"]
    assert whole.peak_allocated > freed.peak_allocated


def test_ddp_has_a_bucket_of_memory_for_each_gradient():
    report, alone = (lab.simulate(GPT, run, "cpu") for run in (replace(SMALL, dp=8), SMALL))
    assert report.detail["other"]["communication buffers"] == GPT_PARAMETERS * 4
    assert report.peak_allocated - alone.peak_allocated == pytest.approx(GPT_PARAMETERS * 4, abs=512)


def test_tensor_parallel_ranks_hold_a_share_of_the_linears_and_with_sequence_parallelism_of_all_activations():
    one, tensor, sequence = (
        lab.simulate(LLAMA, replace(SMALL, seq_len=256, **split), "A100-80GB")
        for split in ({}, {"tp": 4}, {"tp": 4, "sequence_parallel": True})
    )
    assert tensor.parts["weights"] == pytest.approx(one.parts["weights"] / 4, rel=0.02)
    assert tensor.flops == sequence.flops == pytest.approx(one.flops / 4, rel=0.01)
    assert one.parts["activations"] / 4 < tensor.parts["activations"] < 0.8 * one.parts["activations"]
    assert sequence.parts["activations"] < 0.8 * tensor.parts["activations"]


def test_gathering_and_reducing_have_streams_and_so_segments_of_their_own():
    recording = recorded(GPT, replace(SMALL, dp=2, zero=3), "A100-80GB")
    streams = {segment["stream"] for segment in recording.engine.memory.segments()}
    assert len(streams) == 3  # computation, all-gathers' inputs and outputs, reduce-scatters' outputs


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


def test_what_no_engine_does_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("work had begun"))
    with pytest.raises(lab.NotAvailable, match="dp=2, tp=2 with zero=0"):
        lab.simulate(LLAMA, replace(SMALL, dp=2, tp=2), "A100-80GB")


@pytest.mark.parametrize("zero", [0, 3])
def test_too_small_a_card_is_an_outcome_on_many_gpus_too(zero):
    a100 = lab.gpu("A100-80GB")
    card = replace(a100, memory=a100.outside(2) + 30 * 2**20)
    report = lab.simulate(GPT, replace(SMALL, dp=2, zero=zero), card)
    assert report.outcome == "out of memory" and report.where.startswith("forward"), report.where


def patched() -> list:
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.nn.parallel import DistributedDataParallel

    return [
        *(vars(module)[name] for module in (_fsdp_init, _fsdp_param_group) for name in ("_get_device_handle",)),
        _fsdp_param._chunk_with_empty, _fsdp_param_group.foreach_reduce, torch.UntypedStorage.resize_, sys.excepthook,
        ShardingPropagator._propagate_tensor_meta_non_cached, DistributedDataParallel.__init__,
        DistributedDataParallel._pre_forward,
    ]  # fmt: skip


@pytest.mark.parametrize("run", [replace(SMALL, dp=2), replace(SMALL, dp=2, zero=3)], ids=["ddp", "fsdp"])
def test_nothing_stays_patched_and_no_group_stays_open_also_after_an_error(run, monkeypatch):
    before = patched()
    lab.simulate(GPT, run, "A100-80GB")
    assert patched() == before and not dist.is_initialized()
    monkeypatch.setattr("llmlab.step.step.training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lab.simulate(GPT, run, "A100-80GB")
    assert patched() == before and not dist.is_initialized()
