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
