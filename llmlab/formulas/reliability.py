"""How often to save a checkpoint, and which share of the time still trains: δ, M and R.

    δ  save       s for which a save stops training
    M  mtbf       mean s between failures of the whole job
    R  restart    s from a failure until training continues: detection, start, loading
    τ  interval   s of training between the end of a save and the start of the next

Failures are assumed to be independent of each other and of time (exponential intervals). They also strike during saves
and restarts. J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps (2006), derives
these formulas; J. W. Young, A first order approximation to the optimum checkpoint interval (1974), the first order.
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
    """Return the bytes of a checkpoint from which training can continue: weights and optimizer states of all ranks.

    Each of them is saved once, however they are divided over the ranks. Gradients are not saved, because the update has
    used them. With LoRA, only the adapters are saved.
    """
    whole = replace(run, optimizer=run.optimizer, zero=0, dp=1, tp=1, pp=1, cp=1, ep=1, sequence_parallel=False,
                    loss_parallel=True, offload=None)  # fmt: skip
    resident = states(find_model(model), whole)
    weights = 4 * resident.trained if run.lora else resident.weights  # peft keeps adapters in fp32
    return weights + resident.optimizer


def save_seconds(size: int, writers: int, rate: float, storage: float) -> float:
    """Return the s that `writers` need to write `size` bytes, if each sends `rate` bytes/s and the storage accepts
    `storage` bytes/s in total."""
    _positive(writers=writers, rate=rate, storage=storage)
    return size / min(writers * rate, storage)


def mtbf(units: int, of_one: float) -> float:
    """Return the s between failures of a job of `units` GPUs, each of which ends the job once in `of_one` s."""
    _positive(units=units, of_one=of_one)
    return of_one / units


def young(save: float, mtbf: float) -> float:
    """Return the best interval to first order, √(2δM).

    >>> round(young(save=60, mtbf=3 * 3600))
    1138
    """
    _positive(save=save, mtbf=mtbf)
    return math.sqrt(2 * save * mtbf)


def best_interval(save: float, mtbf: float) -> float:
    """Return the interval with the highest goodput, where (1 - τ/M)·exp((τ + δ)/M) = 1. It does not depend on R."""
    _positive(save=save, mtbf=mtbf)
    low, high = 0.0, 1.0  # bounds of τ/M: the left side falls from exp(δ/M) to 0
    for _ in range(60):
        middle = (low + high) / 2
        too_short = math.log1p(-middle) + middle + save / mtbf > 0
        low, high = (middle, high) if too_short else (low, middle)
    return low * mtbf


def goodput(interval: float, save: float, mtbf: float, restart: float = 0.0) -> float:
    """Return the share of the time whose training counts: τ / (M·exp(R/M)·(exp((τ + δ)/M) - 1)).

    Saves, lost work and restarts take the rest. To first order, the goodput is 1 - δ/τ - τ/2M - R/M.
    """
    _positive(interval=interval, save=save, mtbf=mtbf)
    if restart < 0:
        raise SpecError(f"restart={restart!r} is below 0 s")
    try:
        took = mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf)
    except OverflowError:
        return 0.0  # the job never reaches the next checkpoint
    return interval / took


def time_shares(interval: float, save: float, mtbf: float, restart: float = 0.0) -> dict[str, float]:
    """Return the shares of the time that go to training, saves, lost work and restarts. Training is the goodput.

    Between two checkpoints there are exp((τ + δ)/M) - 1 failures on average, and a restart takes M·(exp(R/M) - 1) s,
    because failures interrupt it, too.
    """
    training = goodput(interval, save, mtbf, restart)
    if not training:
        return {"training": 0.0, "saves": 0.0, "lost work": 1.0, "restarts": 0.0}
    failures, whole = math.expm1((interval + save) / mtbf), interval / training
    saves, restarts = save / whole, failures * mtbf * math.expm1(restart / mtbf) / whole
    return {"training": training, "saves": saves, "lost work": 1 - training - saves - restarts, "restarts": restarts}


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise SpecError(f"{name}={value!r} is not above 0")
