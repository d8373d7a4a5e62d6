"""PYTORCH_CUDA_ALLOC_CONF: what torch 2.13 accepts and refuses, so do we."""

import pytest

from llmlab.base.errors import SpecError
from llmlab.base.units import MiB
from llmlab.simulation.allocator.config import AllocatorConfig, round_size


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", AllocatorConfig()),
        ("backend:native", AllocatorConfig()),
        ("expandable_segments:True", AllocatorConfig(expandable_segments=True)),
        (" max_split_size_mb : 128, expandable_segments : False ,", AllocatorConfig(max_split_size=128 * MiB)),
        ("garbage_collection_threshold:0.6", AllocatorConfig(garbage_collection_threshold=0.6)),
        ("roundup_power2_divisions:16", AllocatorConfig(roundup_power2_divisions=16)),
        ("large_segment_size_mb:40", AllocatorConfig(large_segment_size=40 * MiB)),
        (
            "max_split_size_mb:12,large_segment_size_mb:12",
            AllocatorConfig(False, 12 * MiB, large_segment_size=12 * MiB),
        ),
        ("max_non_split_rounding_mb:64", AllocatorConfig(max_non_split_rounding=64 * MiB)),
        ("per_process_memory_fraction:0.5", AllocatorConfig(per_process_memory_fraction=0.5)),
        ("pinned_use_background_threads:True,release_lock_on_cudamalloc:True", AllocatorConfig()),
        ("pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:512", AllocatorConfig()),
    ],
)
def test_what_the_variable_says_is_what_the_config_has(text, config):
    assert AllocatorConfig.parse(text) == config


def test_divisions_by_size_fill_the_intervals_below_the_first_and_above_the_last():
    """torch's own example: 1 below 512 MiB, 2 from there, 4 from 1 GiB, 8 from 2 GiB."""
    config = AllocatorConfig.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8],expandable_segments:True")
    assert config.roundup_power2_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert config.expandable_segments
    only_small = AllocatorConfig.parse("roundup_power2_divisions:[8:4]")
    assert only_small.roundup_power2_divisions == (4,) * 4 + (0,) * 12
    from_2_mib = AllocatorConfig.parse("roundup_power2_divisions:[1:2,>:4]")  # the first interval ends at 2 MiB
    assert from_2_mib.roundup_power2_divisions == (2,) + (4,) * 15
    sizes = (1.2 * MiB, 2.1 * MiB, 40.1 * MiB)
    assert [round_size(int(size), from_2_mib) / MiB for size in sizes] == [1.5, 2.5, 48]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_split_size:20", "no option 'max_split_size'; it has expandable_segments, max_split_size_mb"),
        ("max_split_size_mb:10", "max_split_size is 10.00 MiB; it must be at least 20.00 MiB"),
        ("max_split_size_mb:abc", "'max_split_size_mb:abc'.*write max_split_size_mb:128"),
        ("max_split_size_mb", "write max_split_size_mb:128"),
        ("max_split_size_mb:-5", "write max_split_size_mb:128"),
        ("expandable_segments:true", "write expandable_segments:True"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:high", "write garbage_collection_threshold:0.8"),
        ("per_process_memory_fraction:1.5", "per_process_memory_fraction is"),
        ("roundup_power2_divisions:3", "must be a power of two"),
        ("roundup_power2_divisions:0", "must be a power of two"),
        ("roundup_power2_divisions:[256:3]", "powers of two"),
        ("roundup_power2_divisions:[300:4]", "write roundup_power2_divisions:4"),
        ("roundup_power2_divisions:[0:4]", "write roundup_power2_divisions:4"),
        ("roundup_power2_divisions:[256]", "write roundup_power2_divisions:4"),
        ("large_segment_size_mb:10", "above 10 MiB"),
        ("large_segment_size_mb:40,max_split_size_mb:30", "at least 40.00 MiB"),
        ("max_non_split_rounding_mb:10", "at least 20.00 MiB"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is not simulated"),
        ("throw_on_cudamalloc_oom:True", "not simulated"),
    ],
)
def test_what_torch_refuses_is_refused_with_what_to_write_instead(text, says):
    with pytest.raises(SpecError, match=says):
        AllocatorConfig.parse(text)


def test_the_divisions_must_be_sixteen():
    with pytest.raises(SpecError, match="16 powers of two"):
        AllocatorConfig(roundup_power2_divisions=(1, 2))
