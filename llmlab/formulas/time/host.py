"""Seconds that the CPU takes to start the operators of a step's passes on one device, which the card may wait for.

    host = micro-batches × blocks × operators of a block × the time to start one

Operators are counted, not fitted: the simulator's log has those of the stacks' own classes, one block more or less
(tests/simulation/test_host_operators.py repeats the count). What starting one takes is a host's own
(hardware/efficiencies.toml): Python, the dispatcher and the launch, less in backward, which autograd's engine calls.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stacks import DeepSpeed, Torchtitan, Torchtune
from ..memory.share import adapted
from .efficiency import Efficiency


class Operators(NamedTuple):
    """Operators of a block with a kernel, and without one (views), in forward and in backward."""

    kernels: float
    views: float
    kernels_back: float
    views_back: float

    def seconds(self, host: Efficiency) -> float:
        """Return what `host` takes to start them."""
        forward = self.kernels * host.dispatch + self.views * host.view
        backward = self.kernels_back * host.dispatch + self.views_back * host.view
        return forward + host.backward_dispatch * backward

    def plus(self, more: Operators) -> Operators:
        """Return these and `more`."""
        return Operators(*(mine + theirs for mine, theirs in zip(self, more, strict=True)))


# In mixed precision with fused attention; torchtitan's with FSDP2. What DeepSpeed's stages add are views most of all,
# of the buffers that it gathers into and reduces from, module by module.
TRANSFORMERS = {"rmsnorm": Operators(56, 40, 71, 71), "layernorm": Operators(43, 21, 31, 43)}
TORCHTITAN = Operators(24, 55, 39, 95)
STAGES = {1: Operators(15, 93, 0, 0), 2: Operators(15, 93, 0, 0), 3: Operators(18, 250, 9, 32)}
# What recomputation adds; checkpoint stops at the last tensor that backward needs, before the block's end.
AGAIN = {
    "full": {"rmsnorm": Operators(36, 33, 0, 63), "layernorm": Operators(18, 17, 0, 42)},
    "selective": {"rmsnorm": Operators(29, 45, 0, 63), "layernorm": Operators(13, 26, 0, 42)},
}
TORCHTITAN_AGAIN = {"full": Operators(18, 39, 2, 49), "selective": Operators(13, 48, 2, 49)}
# Each linear layer with adapters, peft's, has as many more.
ADAPTER = Operators(24 / 7, 6, 52 / 7, 66 / 7)
ADAPTER_AGAIN = {"full": Operators(39 / 7, 6, 0, 20 / 7), "selective": Operators(25 / 7, 8, 0, 20 / 7)}

# Seconds that Python takes in a block beside its operators, forward and backward: FSDP2's hooks, which gather and free,
# and DTensor under tensor parallelism (benchmarks/block_host.py, torch 2.13, one thread of a Xeon, 2026-11-25).
FSDP2, DTENSOR = (0.7e-3, 1.0e-3), (3.0e-3, 4.8e-3)


def operators(spec: ModelSpec, run: Training) -> Operators:
    """Return the operators of a block in a micro-batch, adapters' left out."""
    return _operators(spec.norm, getattr(run.stack, "name", "transformers"), run.zero, run.checkpointing)


@cache
def _operators(norm: str, stack: str, zero: int, checkpointing: str | None) -> Operators:
    titan = stack == Torchtitan.name
    once = TORCHTITAN if titan else TRANSFORMERS[norm]
    if stack == DeepSpeed.name and zero:
        once = once.plus(STAGES[zero])
    if checkpointing is None:
        return once
    return once.plus(TORCHTITAN_AGAIN[checkpointing] if titan else AGAIN[checkpointing][norm])


def host_seconds(spec: ModelSpec, run: Training, host: Efficiency) -> float:
    """Return the seconds the CPU takes to start the operators of one device's forward and backward passes; none where a
    compiler has made few kernels of them."""
    if run.compile:
        return 0.0
    seconds = spec.layers * operators(spec, run).seconds(host)
    if adapters := sum(linear.count for linear in adapted(spec, run)):
        each = ADAPTER if run.checkpointing is None else ADAPTER.plus(ADAPTER_AGAIN[run.checkpointing])
        seconds += adapters * each.seconds(host)
    if run.quantization:
        quantized = sum(linear.count for linear in spec.block_linears)
        seconds += quantized * (3 if run.checkpointing == "full" else 2) * host.custom
    return run.accumulation * seconds / run.pp + python_seconds(spec, run)


def python_seconds(spec: ModelSpec, run: Training) -> float:
    """Return the seconds that FSDP2 and DTensor take the CPU in the passes of one device's blocks. DTensor finds out
    for every operator how its tensors are laid out and what must be sent, a compiler once; stacks that divide layers
    themselves, as Megatron-LM does, have none."""
    if run.compile or not isinstance(run.stack, (Torchtitan, Torchtune)):
        return 0.0
    seconds = sum(FSDP2) if run.zero == 3 else 0.0
    if run.tp > 1:
        seconds += sum(DTENSOR) + (DTENSOR[0] if run.checkpointing else 0.0)
    return run.accumulation * spec.layers / run.pp * seconds
