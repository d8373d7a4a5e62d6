"""CUB's scratch, held to what CUB 3.0 itself answers on each architecture when it is asked for the size.

Its host code was run (CUDA 13.0, std::plus for sums, as in PyTorch) and told the architecture and how many
multiprocessors there are; no GPU is needed for that question.
"""

import pytest

from llmlab.hardware.gpu import gpu as find_gpu
from llmlab.simulation.workspaces.cub import (
    reduce_scratch,
    scan_scratch,
    select_scratch,
    sort_scratch,
    sum_by_key_scratch,
)

T4, A100, H100 = (find_gpu(name) for name in ("T4", "A100-40GB", "H100-SXM"))


@pytest.mark.parametrize(
    ("n", "key", "bits", "sizes"),
    [
        (2304, 8, 64, (1, 1, 1)),  # one block of threads
        (2305, 8, 8, (3583, 3583, 3583)),  # one pass
        (65_536, 8, 10, (1_077_759, 1_071_615, 1_068_543)),
        (1_000_003, 8, 64, (16_381_951, 16_284_671, 16_240_639)),
        (50_000, 4, 32, (627_455, 626_431, 619_263)),
        (1_000_003, 4, 32, (12_373_759, 12_343_039, 12_200_703)),
    ],
)
def test_sorting_pairs_takes_what_cub_says(n, key, bits, sizes):
    assert tuple(sort_scratch(n, key, 8, card, bits) for card in (T4, A100, H100)) == sizes


def test_keys_of_two_bytes_are_counted_in_passes_before_hopper():
    """One block of threads a multiprocessor, by the registers that ptxas gives the kernels."""
    assert [sort_scratch(n, 2, 8, A100) for n in (2304, 50_000, 512_000)] == [1, 1_098_495, 5_718_271]


def test_sums_and_selections_take_what_cub_says():
    assert [scan_scratch(n, 4) for n in (1, 1921, 200_000)] == [1023, 1023, 1791]
    assert [scan_scratch(n, 8) for n in (1, 1921, 200_000)] == [1279, 1279, 4607]
    assert [sum_by_key_scratch(200_000, card) for card in (T4, A100, H100)] == [2815, 2047, 2047]
    assert [select_scratch(200_000, card) for card in (T4, A100, H100)] == [3327, 1535, 1279]
    assert [reduce_scratch(n, A100, 2048) for n in (100, 10_000, 200_000)] == [1, 17_663, 17_663]
    assert [reduce_scratch(10_000, card, threads) for card, threads in ((T4, 1024), (H100, 2048))] == [3583, 21_503]
