"""Your data parallelism: gradients are averaged over ranks, and each rank reads its own share of the examples."""

import torch

# ---- chapter 11


def average_in_backward(parameters, dp, all_reduce, bucket_bytes):
    """Register hooks that replace each gradient by its mean over `dp` ranks, during the backward pass.

    `all_reduce(flat)` sums a flat tensor over all ranks, in place. Call it once per bucket,
    as soon as all gradients of the bucket are complete. Fill the buckets from the last
    parameter to the first. A bucket has at most `bucket_bytes` bytes, unless a single
    gradient is larger.
    """
    raise NotImplementedError


def share(count, rank, dp, epoch):
    """Return the numbers of the examples, of `count`, that `rank` reads, as a list.

    All ranks shuffle alike, with torch.randperm and a generator seeded with the epoch.
    If dp does not divide the count, append examples from the beginning of the shuffled
    list until it does. Rank r then takes examples r, r + dp, r + 2 dp, and so on.
    """
    raise NotImplementedError
