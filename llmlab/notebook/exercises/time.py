"""Facts about the functions of yours/time.py."""

from __future__ import annotations

from ...formulas.time.flops import flops
from ...specs.model import model
from ...specs.run import Training

step_time = {
    "an operator that is bound by FLOP": lambda f: f([(200, 1)], 100, 10, 0) == 2,
    "an operator that is bound by bytes": lambda f: f([(1, 50)], 100, 10, 0) == 5,
    "each operator has its own limit": lambda f: f([(200, 1), (1, 50)], 100, 10, 0) == 7,
    "many small operators wait for the CPU": lambda f: f([(1, 1)] * 10, 100, 100, 2) == 20,
    "a few large operators do not": lambda f: f([(1000, 1)] * 2, 100, 100, 2) == 20,
}

_mixtral = model("mistralai/Mixtral-8x7B-v0.1")
_expert = 3 * _mixtral.config["hidden_size"] * _mixtral.config["intermediate_size"]
_counted = flops(_mixtral, Training(seq_len=128)).model / (6 * 128)

active = {
    "all experts chosen": lambda f: f(1000, 2, 4, 100, 4) == 1000,
    "one of four": lambda f: f(1000, 2, 4, 100, 1) == 400,
    "Mixtral, to 2 %": lambda f: abs(f(_mixtral.parameters, 32, 8, _expert, 2) / _counted - 1) < 0.02,
}

_FULL, _WAITING = [(1, 4), (4, 7), (7, 10)], [(3, 4), (6, 7), (9, 10)]

gaps = {
    "a full row has no gaps": lambda f: f(_FULL) == 0,
    "two gaps of 2": lambda f: f(_WAITING) == 4,
    "in any order": lambda f: f(_WAITING[::-1]) == 4,
    "a single kernel has no gap": lambda f: f([(5.0, 6.0)]) == 0,
}

_calls = [
    {"name": name, "tid": 0, "ts": start, "dur": duration}
    for name, start, duration in (
        ("optimizer", 0, 10), ("copy_", 2, 4), ("copy_", 3, 1), ("add", 7, 2), ("copy_", 20, 5),
    )
]  # fmt: skip

share_of = {
    "a single call": lambda f: f(_calls, "optimizer", "add") == 0.2,
    "a call inside a matching call counts once": lambda f: f(_calls, "optimizer", "copy") == 0.4,
    "no matching call": lambda f: f(_calls, "optimizer", "mm") == 0,
}

_four = [(second, 10) for second in (1, 2, 3, 4)]
_many = [(second, 1) for second in range(1, 101)]  # as fast as the link sends

averaged_at = {
    "one bucket waits for the whole backward pass": lambda f: f(_four, 40, latency=1, beta=10) == 4 + 1 + 4,
    "the second of two buckets waits for the first": lambda f: f(_four, 20, latency=1, beta=10) == 2 + 3 + 3,
    "an idle link waits for the gradient": lambda f: f([(1, 10), (9, 10)], 10, latency=1, beta=10) == 9 + 2,
    "a large gradient travels alone": lambda f: f([(1, 5), (2, 50), (3, 5)], 10, latency=0, beta=5) == 2 + 10 + 1,
    "buckets of 10 beat 1 and 100": (
        lambda f: min((1, 10, 100), key=lambda size: f(_many, size, latency=3, beta=1)) == 10
    ),
}
