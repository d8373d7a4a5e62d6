"""torchtitan's job config: what its settings decide."""

import pytest

import llmlab as lab


def test_weights_are_gathered_in_fp8_where_the_setting_of_their_all_gather_says_so():
    """torchao's Float8LinearConfig; scales that are computed in advance are another setting, of no bytes."""
    job = {"model": {"converters": ["quantize.linear.float8"]}, "compile": {"enable": True},
           "parallelism": {"data_parallel_shard_degree": 8}}  # fmt: skip

    def gathers(*settings: str) -> bool:
        float8 = {"linear": {"float8": dict.fromkeys(settings, True)}}
        return lab.Training.from_torchtitan({**job, "quantize": float8}).gathers_float8

    assert gathers("enable_fsdp_float8_all_gather")
    assert not gathers("precompute_float8_dynamic_scale_for_fsdp") and not gathers()


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
