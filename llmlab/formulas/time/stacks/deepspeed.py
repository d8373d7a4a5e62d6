"""DeepSpeed's messages, and the CPU time of its updates."""

from __future__ import annotations

from math import ceil

from ....specs.model import ModelSpec
from ....specs.run import Training
from ....specs.stacks import DeepSpeed

# The CPU time of an update by DeepSpeed's optimizers, in operators (benchmarks/time/deepspeed_hooks.py, DeepSpeed
# 0.19.8), by stage: per parameter, and the rest. The optimizers loop over parameters to look for overflow, to copy
# gradients and to compute norms, although the update itself runs on concatenated tensors.
JOINED = {0: (4.9, 41), 1: (3.0, 65), 2: (3.1, 55), 3: (3.1, 72)}


def update(spec: ModelSpec, run: Training, tensors: float) -> float:
    """Return the number of operators that take as long as an update of `tensors` trained tensors."""
    per_parameter, besides = JOINED[run.zero]
    return besides + per_parameter * tensors


def messages(run: Training, elements: float, matrices: int) -> tuple[int, int, float]:
    """Return the number of messages in which ZeRO-3 gathers a block of `elements` elements, the number in which it
    reduce-scatters the block's gradients, and the fraction of the block that is gathered once more for the backward
    pass, after the block was recomputed.

    It gathers the next parameters until they fill a prefetch bucket, and does not free parameters that are used again
    within its reuse distance (runtime/zero/partitioned_param_coordinator.py, fetch_sub_module and _params_to_release).
    It reduce-scatters the gradients in a bucket when the next one does not fit. A matrix larger than the bucket is sent
    alone, and so are the vectors before it (stage3.py, reduce_independent_p_g_buckets_and_remove_grads).
    """
    options = DeepSpeed.of(run)
    gathers = min(matrices, ceil(elements / options.stage3_prefetch_bucket_size))
    alone = elements / matrices > options.reduce_bucket_size
    scatters = 2 * matrices if alone else ceil(elements / options.reduce_bucket_size)
    # Between two uses of a matrix, every matrix that follows it in the block is used twice.
    resident_share = min(1.0, options.stage3_max_reuse_distance / (2 * elements))
    return gathers, scatters, 1 - resident_share if run.checkpointing else 0.0
