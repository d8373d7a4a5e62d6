"""One rank of many: simulated bytes against real processes that gloo joins, and what is refused before any work."""

import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import llmlab as lab
from llmlab.simulation.report import recorded

GPT = {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 256, "vocab_size": 2000}
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 2, "intermediate_size": 352, "vocab_size": 2000,
         "max_position_embeddings": 256}  # fmt: skip
GPT_PARAMETERS = 685_568
SMALL = lab.Training(micro_batch=2, seq_len=128)
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
