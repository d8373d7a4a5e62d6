"""How often to save a checkpoint, and what share of the time is left: δ, M and R.

    δ  save       s for which a save stops training
    M  mtbf       mean s between failures of the whole job
    R  restart    s from a failure until training goes on: noticing it, starting again, loading
    τ  interval   s of training from the end of a save to the start of the next

Failures are assumed independent of one another and of time (exponential intervals); they also strike saves and
restarts. J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps (2006), derives it
all; J. W. Young, A first order approximation to the optimum checkpoint interval (1974), the first order.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..base.errors import SpecError
from ..specs.model import ModelLike
from ..specs.model import model as find_model
from ..specs.run import Training
from .memory.states import states


def checkpoint_bytes(model: ModelLike, run: Training) -> int:
    """Return the bytes of a checkpoint that training can go on from: weights and optimizer states, over all ranks.

    However they are divided over ranks, they are saved once. Gradients are not: a step has used them up. With LoRA,
    only the adapters are trained, and saved.
    """
    whole = replace(run, optimizer=run.optimizer, zero=0, dp=1, tp=1, pp=1, cp=1, ep=1, sequence_parallel=False,
                    loss_parallel=True, offload=None)  # fmt: skip
    resident = states(find_model(model), whole)
    weights = 4 * resident.trained if run.lora else resident.weights  # peft keeps adapters in fp32
    return weights + resident.optimizer


def save_seconds(size: int, writers: int, each: float, storage: float) -> float:
    """Return the s that `writers` need for `size` bytes, where one writes `each` bytes/s and the storage takes
    `storage` bytes/s of all together."""
    _positive(writers=writers, each=each, storage=storage)
    return size / min(writers * each, storage)


def mtbf(units: int, of_one: float) -> float:
    """Return the s between failures of a job that any of `units` ends, each of which fails every `of_one` s."""
    _positive(units=units, of_one=of_one)
    return of_one / units


def young(save: float, mtbf: float) -> float:
    """Return the interval √(2δM), Young's first order.

    >>> round(young(save=60, mtbf=3 * 3600))
    1138
    """
    _positive(save=save, mtbf=mtbf)
    return math.sqrt(2 * save * mtbf)


def best_interval(save: float, mtbf: float) -> float:
    """Return the interval of the highest goodput: the root of (1 - τ/M)·exp((τ + δ)/M) = 1, where its derivative is 0.

    It does not depend on the restart time.
    """
    _positive(save=save, mtbf=mtbf)
    low, high = 0.0, 1.0  # of τ/M: the left side falls from exp(δ/M) to 0
    for _ in range(60):
        middle = (low + high) / 2
        above = math.log1p(-middle) + middle + save / mtbf > 0
        low, high = (middle, high) if above else (low, middle)
    return low * mtbf


def goodput(interval: float, save: float, mtbf: float, restart: float = 0.0) -> float:
    """Return the share of the time that trains and is kept: τ / (M·exp(R/M)·(exp((τ + δ)/M) - 1)).

    What a failure throws away, saves and restarts are the rest. To first order it is 1 - δ/τ - τ/2M - R/M.
    """
    _positive(interval=interval, save=save, mtbf=mtbf)
    if restart < 0:
        raise SpecError(f"restart={restart!r} is below 0 s")
    try:
        took = mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf)
    except OverflowError:
        return 0.0  # it never gets from one checkpoint to the next
    return interval / took


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise SpecError(f"{name}={value!r} is not above 0")
