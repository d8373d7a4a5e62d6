"""torchtitan's job config: what its settings decide."""

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
