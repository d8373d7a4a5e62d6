"""Sizes of the live runs on a page: small on a CPU, as on Colab on a small GPU, and larger on a big GPU.

    print(lab.scale())     # prints the sizes and the reason
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..base.errors import NotAvailable, SpecError
from ..base.terms import Precision
from ..base.units import GiB, show_bytes
from .this_machine import Host, host

VARIABLE = "LLMLAB_SCALE"
NAMES = ("cpu", "t4", "big")

# model, micro_batch, seq_len, steps. cpu: a step takes seconds on two cores. t4 and big: estimated at up to 6.2 and
# 14.3 GiB, in fp32 with eager attention, so that they fit with room to spare from 10 and 20 GiB on.
SIZES = {"cpu": ("gpt2", 1, 128, 3), "t4": ("gpt2", 4, 512, 5), "big": ("gpt2-medium", 4, 512, 10)}
T4_FROM = 10 * GiB
BIG_FROM = 20 * GiB  # some GPUs sold with 24 GB show less than 22


@dataclass(frozen=True)
class Scale:
    """The sizes of live runs on this machine, with their `device` and `precision`; `reason` explains the choice.

    `name`: "cpu", "t4" or "big". `precision`: as in Training. `model`: a preset's name. `steps`: optimizer steps.
    """

    name: str
    device: str
    precision: Precision
    model: str
    micro_batch: int
    seq_len: int
    steps: int
    reason: str

    def __str__(self) -> str:
        return (
            f"scale {self.name}: {self.model}, micro_batch {self.micro_batch}, seq_len {self.seq_len}, "
            f"{self.precision}, {self.steps} steps on {self.device}, because {self.reason}"
        )


def scale() -> Scale:
    """Return the sizes for this machine; LLMLAB_SCALE=cpu, t4 or big overrides its choice.

    Raises SpecError if LLMLAB_SCALE is none of these, and NotAvailable if it asks for a missing GPU.
    """
    return choose(host(), os.environ.get(VARIABLE))


def choose(machine: Host, name: str | None = None) -> Scale:
    """Return the sizes for the machine `machine`, or those of the scale `name`. Same errors as `scale`."""
    name = (name or "").strip().lower()
    if name and name not in NAMES:
        raise SpecError(f"{VARIABLE}={name} is not one of {', '.join(NAMES)}")
    if name in ("t4", "big") and machine.device != "cuda":
        raise NotAvailable(f"{VARIABLE}={name} needs a CUDA GPU, and there is none here; unset it, or set it to cpu")
    if name == "cpu":
        return _scale("cpu", "cpu", "fp32", f"{VARIABLE}=cpu asks for it")
    if machine.device == "mps":
        return _scale("cpu", "mps", "fp32", f"{machine.name} is no CUDA GPU")
    if machine.device == "cpu":
        torch = machine.versions.get("torch")
        why = f"torch {torch} finds no GPU" if torch else "torch is not installed (pip install torch transformers)"
        return _scale("cpu", "cpu", "fp32", why)
    memory = machine.memory or 0
    fitting = "big" if memory >= BIG_FROM else "t4" if memory >= T4_FROM else "cpu"
    precision: Precision = "autocast-bf16" if machine.supports_bf16 else "autocast-fp16"
    why = f"{machine.name} has {show_bytes(machine.memory)} and {'bf16' if machine.supports_bf16 else 'no bf16'}"
    return _scale(name or fitting, "cuda", precision, f"{VARIABLE}={name} asks for it, and {why}" if name else why)


def _scale(name: str, device: str, precision: Precision, reason: str) -> Scale:
    model, micro_batch, seq_len, steps = SIZES[name]
    return Scale(name, device, precision, model, micro_batch, seq_len, steps, reason)
