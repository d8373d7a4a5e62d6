"""torchtitan's job config: what its settings decide."""

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.engines.torchtitan import torchtitan_config


def test_weights_are_gathered_in_fp8_where_the_setting_of_their_all_gather_says_so():
    """torchao's Float8LinearConfig; scales that are computed in advance are another setting, of no bytes."""
    job = {"model": {"converters": ["quantize.linear.float8"]}, "compile": {"enable": True},
           "parallelism": {"data_parallel_shard_degree": 8}}  # fmt: skip

    def gathers(*settings: str) -> bool:
        float8 = {"linear": {"float8": dict.fromkeys(settings, True)}}
        return lab.Training.from_torchtitan({**job, "quantize": float8}).gathers_float8

    assert gathers("enable_fsdp_float8_all_gather")
    assert not gathers("precompute_float8_dynamic_scale_for_fsdp") and not gathers()


def test_context_parallel_ranks_share_the_weights_of_one_shard():
    """torchtitan shards over dp_shard times cp, so one shard with cp=8 is FSDP over eight ranks, not DDP."""
    run = lab.Training.from_torchtitan({"parallelism": {"data_parallel_shard_degree": 1, "context_parallel_degree": 8}})
    assert (run.dp, run.cp, run.zero) == (1, 8, 3)


@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("enable_async_tensor_parallel", False, True),
        ("disable_loss_parallel", False, True),
        ("context_parallel_rotate_method", "allgather", "alltoall"),
    ],
)
def test_a_setting_that_changes_memory_and_is_not_described_is_refused_by_name(key, default, other):
    job = {"parallelism": {"data_parallel_shard_degree": 8}}
    with_default = {"parallelism": job["parallelism"] | {key: default}}
    assert lab.Training.from_torchtitan(with_default) == lab.Training.from_torchtitan(job)
    with pytest.raises(lab.SpecError, match=f"{key}={other!r} is not supported"):
        lab.Training.from_torchtitan({"parallelism": job["parallelism"] | {key: other}})


@pytest.mark.parametrize(("text", "said"), [
    ("[training]\nbatch = 2", "torchtitan's training settings batch"),
    ("[zero_optimization]\nstage = 2", "are settings of DeepSpeed"),
    ("[optimizer]\nname = 'Muon'", "optimizer.name='Muon'"),
    ("[training]\nseq_len = 64", "give dp="),
    ("[training\n", "not a config of torchtitan"),
])  # fmt: skip
def test_torchtitans_settings_that_are_wrong_are_named(text, said):
    with pytest.raises(SpecError, match=said):
        lab.Training.from_torchtitan(text)


def test_torchtitans_experts_are_not_divided_by_tensors():
    text = "[parallelism]\ndata_parallel_shard_degree = 2\nexpert_tensor_parallel_degree = {}\n"
    assert lab.Training.from_torchtitan(text.format(1)).dp == 2
    with pytest.raises(SpecError, match="expert_tensor_parallel_degree=2"):
        lab.Training.from_torchtitan(text.format(2))


@pytest.mark.parametrize(("name", "order"), [
    ("1F1B", ("1f1b", 1)), ("gpipe", ("gpipe", 1)), ("Interleaved1F1B", ("1f1b", 2)),
])  # fmt: skip
def test_torchtitans_schedule_is_read_and_written_by_torchs_name(name, order):
    """Any case is read, as torch does; a stage of `pp` ranks keeps its weights by default, which is zero=2."""
    config = {"parallelism": {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": name},
              "training": {"local_batch_size": 8}}  # fmt: skip
    run = lab.Training.from_torchtitan(config, dp=2)
    assert (run.schedule, run.virtual_stages) == order and run.zero == 2
    written = torchtitan_config(run, "meta-llama/Llama-3.1-8B")["parallelism"]
    assert written["pipeline_parallel_schedule"].lower() == name.lower()
    assert written["fsdp_reshard_after_forward"] == "default"
    with pytest.raises(SpecError, match="pipeline_parallel_schedule='ZBVZeroBubble' is not supported"):
        lab.Training.from_torchtitan({"parallelism": {**config["parallelism"],
                                                  "pipeline_parallel_schedule": "ZBVZeroBubble"}}, dp=2)  # fmt: skip
