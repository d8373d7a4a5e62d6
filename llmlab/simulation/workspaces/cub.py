"""Workspaces of CUB's algorithms: PyTorch asks CUB for the size, and the caching allocator for the bytes.

Source: CUB 3.0, part of CUDA 13.0, with which torch 2.13 is built: cub/device/dispatch/*.cuh, and for the sizes of
tiles cub/device/dispatch/tuning/*.cuh. A tile is the data that one block of threads reads at a time; its size is tuned
for the GPU's architecture and the bytes of keys and values. ATen/cuda/cub.cuh counts elements in int64 for sorts, and
in int32 for scans.

    n  elements
"""

from __future__ import annotations

from ...hardware.gpu import GPU

ALIGNED = 256  # bytes; util_temporary_storage.cuh, AliasTemporaries
RADIX_BITS, PORTION = 8, (1 << 28) - 1
# tuning_radix_sort.cuh: elements of a tile by the bytes of a key and of a value, on sm_70 and 75, on sm_80 to 89, and
# on newer GPUs. None means an older algorithm, whose passes store 128 counts of digits for each block of threads.
SORT_TILES: dict[tuple[int, int], tuple[int | None, int | None, int]] = {
    (1, 8): (None, None, 3456), (2, 8): (None, None, 5632), (4, 8): (2816, 3072, 5376), (8, 8): (2816, 3840, 4608),
    (4, 4): (11776, 6528, 6528), (8, 4): (2816, 3840, 5760), (4, 0): (5888, 8064, 7296), (8, 0): (2816, 3840, 5760),
    (1, 0): (None, None, 9728), (2, 0): (None, None, 9728),
}  # fmt: skip
# dispatch_radix_sort.cuh, InvokePasses; its kernels' registers (ptxas) leave room for one block per multiprocessor.
PASS_DIGITS, PASS_TILE = 128, 5632
SCAN_TILES = {4: 1920, 8: 896}  # tuning_scan.cuh, sm_60 and newer: by the bytes of a sum
# tuning_scan_by_key.cuh and tuning_select_if.cuh: sm_75, sm_80, sm_86 and 89, sm_90, newer.
SUM_BY_KEY_TILES, SELECT_TILES = (2304, 3840, 2304, 4032, 4480), (640, 2304, 640, 4224, 3520)
SCAN_STATES = 32  # extra states beyond the tiles; agent/single_pass_scan_operators.cuh, num_tiles_to_num_tile_states
REDUCE_TILE, REDUCE_THREADS = 4096, 256  # tuning_reduce.cuh
BLOCKS = 5  # thread blocks launched per resident block; util_arch.cuh, subscription_factor


def pieces(*sizes: int) -> int:
    """Return the bytes of one allocation that holds pieces of `sizes` bytes, each aligned to 256 bytes."""
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes) + ALIGNED - 1


def single_tile(key: int, value: int) -> int:
    """Return how many elements one thread block can sort in shared memory: 19 items of up to 4 B per thread, or 9."""
    return 256 * (19 if max(key, value) <= 4 else 9)


def sort_scratch(n: int, key: int, value: int, gpu: GPU, bits: int | None = None) -> int:
    """Return the bytes that DeviceRadixSort requests for `n` keys of `key` bytes with values of `value` bytes (0 for no
    values), sorted by `bits` of the key. They hold the counts of digits per pass, the state that each tile passes to
    the next ones, and a second set of keys and values (dispatch_radix_sort.cuh, InvokeOnesweep).

    Before sm_90 the counts are unknown for keys of one byte, and for keys of two bytes without values.
    """
    if n <= single_tile(key, value):
        return 1
    passes = -(-(8 * key if bits is None else bits) // RADIX_BITS)
    second_set = [n * key, n * value] if passes > 1 else [0, 0]
    tile = SORT_TILES[key, value and max(4, value)][(0, 1, 1, 2, 2)[_generation(gpu)]]
    if tile is None:
        counts = BLOCKS * gpu.sms * PASS_DIGITS + PASS_TILE if (key, value) == (2, 8) else 0
        return pieces(8 * counts, n * key, n * value)
    portion = PORTION // tile * tile
    portions, blocks, digits = -(-n // portion), -(-min(n, portion) // tile), 1 << RADIX_BITS
    return pieces(portions * passes * digits * 8, blocks * digits * 4, *second_set, portions * passes * 4)


def scan_scratch(n: int, item: int) -> int:
    """Return the bytes that DeviceScan requests to sum `n` elements in `item` bytes: a state and a sum per tile."""
    tiles = -(-n // SCAN_TILES[max(4, item)])
    return pieces(pieces((tiles + SCAN_STATES) * 2 * max(4, item)))


def sum_by_key_scratch(n: int, gpu: GPU) -> int:
    """Return the bytes that DeviceScan requests to sum `n` uint32 by key: dispatch_scan_by_key.cuh."""
    tiles = -(-n // SUM_BY_KEY_TILES[_generation(gpu)])
    return pieces(16 * (tiles + SCAN_STATES), 4 * (tiles + 1))


def select_scratch(n: int, gpu: GPU) -> int:
    """Return the bytes that DeviceSelect requests to select from `n` int64 by a flag: dispatch_select_if.cuh."""
    tiles = -(-n // SELECT_TILES[_generation(gpu)])
    return pieces(pieces(8 * (tiles + SCAN_STATES)), 0, 0)


def _generation(gpu: GPU) -> int:
    """Return the index of the tuning for the GPU's kernels, among those for sm_75, 80, 86, 90 and 100."""
    return sum((gpu.compute_capability or (8, 0)) >= since for since in ((8, 0), (8, 6), (9, 0), (10, 0)))


def reduce_scratch(n: int, gpu: GPU, threads: int) -> int:
    """Return the bytes that DeviceReduce requests to sum `n` elements in int32: one sum per block, for five times as
    many blocks as fit on the GPU. `threads` is the number of threads that fit on a multiprocessor."""
    return 1 if n <= REDUCE_TILE else pieces(4 * gpu.sms * (threads // REDUCE_THREADS) * BLOCKS)
