"""DeepSpeed's messages, and what its host does in an update."""

from __future__ import annotations

from math import ceil

from ....specs.model import ModelSpec
from ....specs.run import Training
from ....specs.stacks import DeepSpeed

# An update by its optimizers, in operators (benchmarks/time/deepspeed_hooks.py, DeepSpeed 0.19.8): for each parameter,
# which they loop over to look for overflow, to copy its gradient and to take its norm, although the update itself is of
# joined tensors; and besides. By stage.
JOINED = {0: (4.9, 41), 1: (3.0, 65), 2: (3.1, 55), 3: (3.1, 72)}


def update(spec: ModelSpec, run: Training, tensors: float) -> float:
    """Return as many operators as take as long as an update of so many trained `tensors`."""
    per_parameter, besides = JOINED[run.zero]
    return besides + per_parameter * tensors


def messages(run: Training, elements: float, matrices: int) -> tuple[int, int, float]:
    """Return in how many messages ZeRO-3 gathers a block of so many elements, and scatters it, and the share of it that
    is gathered once more for backward, after it was computed again.

    It gathers the next parameters until they are a prefetch bucket, and keeps those that are used again within its
    reuse distance (runtime/zero/partitioned_param_coordinator.py, fetch_sub_module and _params_to_release).
    It scatters what a bucket holds before a gradient that does not fit: a matrix that is larger goes alone, and so do
    the vectors before it (stage3.py, reduce_independent_p_g_buckets_and_remove_grads).
    """
    options = DeepSpeed.of(run)
    gathers = min(matrices, ceil(elements / options.stage3_prefetch_bucket_size))
    alone = elements / matrices > options.reduce_bucket_size
    scatters = 2 * matrices if alone else ceil(elements / options.reduce_bucket_size)
    # A matrix is used again after all that follow it in the block, twice.
    resident_share = min(1.0, options.stage3_max_reuse_distance / (2 * elements))
    return gathers, scatters, 1 - resident_share if run.checkpointing else 0.0
