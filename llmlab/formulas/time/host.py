"""Seconds that the CPU takes to start the operators of a step's passes on one device, which the card may wait for.

    host = micro-batches × blocks × operators of a block × the time to start one

Operators are counted, not fitted: the simulator's log has those of the stacks' own classes, one block more or less
(tests/simulation/test_host_operators.py repeats the count). What starting one takes is a host's own
(hardware/efficiencies.toml): Python, the dispatcher and the launch, less in backward, which autograd's engine calls.

DeepSpeed's ZeRO-3 runs Python of its own around every module (runtime/zero/parameter_offload.py): its hooks were timed
beside operators, on a CPU, by benchmarks/time/deepspeed_hooks.py.

A compiled step has a host too: its graph starts each kernel from Python, and guards, autograd and the optimizer take
their time for each parameter.
"""

from __future__ import annotations

from functools import cache, lru_cache, reduce
from math import sqrt
from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.run import Training, stack_of
from ..again import share_again, whole_again
from ..memory.precision import PRECISION
from ..memory.share import adapted, adapter_bytes, by_bitsandbytes
from .efficiency import Efficiency
from .products import products
from .stacks import deepspeed, megatron


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

    def times(self, count: float) -> Operators:
        """Return these, `count` times."""
        return Operators(*(count * mine for mine in self))


class Hooks(NamedTuple):
    """As many operators take as long as the hooks of a module, and more for each of its parameters that stays whole, or
    that is gathered."""

    module: float
    whole: float
    gathered: float


# Of a block with two norms and fused attention, all in one dtype; torchtitan's in mixed precision with FSDP2. What
# DeepSpeed's stages 1 and 2 add are views most of all, of the buffers that it reduces from. What stage 3 adds,
# operators among it, is its hooks' time.
TRANSFORMERS = {
    "rmsnorm": Operators(38, 40, 71, 71),
    "fused-norm": Operators(24, 38, 41, 65),
    "layernorm": Operators(19, 21, 31, 43),
}
# A block of transformers that generates a token in 16 bits with SDPA and a DynamicCache, which concatenates keys and
# values; and per token, outside the blocks: embedding, last norm, head, and generate()'s greedy choice and stop test.
GENERATING = {"rmsnorm": Operators(40, 36, 0, 0), "layernorm": Operators(19, 18, 0, 0)}
GENERATING_ENDS = {"rmsnorm": Operators(36, 11, 0, 0), "layernorm": Operators(22, 12, 0, 0)}
GENERATING_NORM = Operators(8, 0, 0, 0)  # another RMSNorm, as of queries and of keys
# The time of an operator of which autograd records nothing, relative to one in a forward pass of training, from which
# `dispatch` was derived: 0.7, the median of 16 rounds
# from 0.5 to 1.2 on a busy machine (benchmarks/time/generation_host.py, torch 2.13, one thread of an EPYC, 2026-11-29).
UNRECORDED = 0.7
# Casts: in mixed precision of weights, once; autocast's of inputs and weights too, again in what is computed again.
MIXED = {"rmsnorm": 18, "fused-norm": 18, "layernorm": 24}
AUTOCAST = {"rmsnorm": (10, 16), "fused-norm": (14, 20), "layernorm": (12, 16)}
# A norm more, as of queries and of keys; attention whose scores are written out, and where keys are repeated for it.
NORM, NORM_AGAIN = Operators(8, 1, 16, 4), Operators(8, -1, 0, 11)
EAGER, EAGER_AGAIN = Operators(7, 9, 8, 10), Operators(7, 9, 0, 2)
REPEATED, REPEATED_AGAIN = Operators(2, 6, 2, 4), Operators(2, 6, 0, 0)
TORCHTITAN = Operators(24, 55, 39, 95)
# As many as take as long as a layer of megatron-core, whose Python is most of it: 2.1 times a Llama's forward and 1.3
# times its backward (benchmarks/time/megatron_host.py, megatron-core 0.16.1, its own layers).
MEGATRON = Operators(118, 84, 92, 92)
# As many as take as long as what else a micro-batch has there: its tensors sent to tensor ranks, embedding, last norm,
# head, loss and schedule, 93 to 130 of a Llama's forward and 64 to 100 of its backward (as above, whole steps).
MEGATRON_ENDS = Operators(100, 70, 74, 74)
STAGES = {("deepspeed", 1): Operators(7, 89, 0, 0), ("deepspeed", 2): Operators(-2, 65, 9, 36)}
# What recomputation adds; checkpoint stops at the last tensor that backward needs, before the block's end.
AGAIN = {
    "full": {"rmsnorm": Operators(36, 33, 0, 63), "fused-norm": Operators(20, 35, 2, 49),
             "layernorm": Operators(18, 17, 0, 42)},
    "selective": {"rmsnorm": Operators(29, 45, 0, 63), "fused-norm": Operators(13, 47, 2, 49),
                  "layernorm": Operators(13, 26, 0, 42)},
}  # fmt: skip
TORCHTITAN_AGAIN = {"full": Operators(18, 39, 2, 49), "selective": Operators(13, 48, 2, 49)}
MEGATRON_AGAIN = {"full": Operators(118, 84, 0, 0), "selective": AGAIN["selective"]["layernorm"]}
OWN = {"torchtitan": (TORCHTITAN, TORCHTITAN_AGAIN), "megatron": (MEGATRON, MEGATRON_AGAIN)}
ENDS = {"megatron": MEGATRON_ENDS}
UPDATES = {"deepspeed": deepspeed.update, "megatron": megatron.update}
# benchmarks/time/deepspeed_hooks.py, DeepSpeed 0.19.8; 0.12.4, of 2023, gave the same within 30 %. On one process:
# gathering from others is a collective's time. `HERE`: seconds of an operator on that CPU.
FORWARD, BACKWARD = Hooks(14, 2, 6), Hooks(7, 8, 24)
HERE = 4.1e-6
# Seconds in which a compiled graph starts a kernel: Inductor's launcher, with 19 arguments, on a GB200's host; 6.8 us
# without any (meta-pytorch/tritonbench, pull request 1017, 2026-04). Products and attention, which the graph calls by
# their operators, are taken to start as fast.
COMPILED = 9.1e-6
# Kernels that Inductor writes for a block, forward and backward, and those that autocast adds: casts of weights, and of
# their gradients.
WRITTEN = {"rmsnorm": (5, 9), "layernorm": (3, 8)}
WRITTEN_CASTS = {"rmsnorm": (7, 7), "layernorm": (8, 4)}
# As many operators take as long as a compiled graph does for each parameter, before it starts (guards, the autograd
# function) and for its gradient; and as torch's AdamW does in an update, fused or on lists
# (benchmarks/time/block_host.py, torch 2.13, 2026-11-26). Of Qwen3-8B guards and arguments took 2.2 us per parameter
# (pytorch/pytorch, issue 191753).
GUARDED, RETURNED, UPDATED = 0.4, 0.8, 0.9
# A block of frozen weights makes no gradient of them, autocast casts none, and what is computed again has fewer views.
FROZEN = {"rmsnorm": Operators(0, 0, -11, -32), "fused-norm": Operators(0, 0, -7, -30),
          "layernorm": Operators(0, 0, -8, -20)}  # fmt: skip
FROZEN_CASTS = Operators(0, 0, -8, 0)
FROZEN_AGAIN = {"rmsnorm": Operators(0, 0, 0, -36), "fused-norm": Operators(0, 0, 0, -32),
                "layernorm": Operators(0, 0, 0, -24)}  # fmt: skip
# Each linear layer with adapters, peft's, has as many more, and one more in each pass where it has dropout: adapters in
# the layer's dtype, in another, and under autocast.
ADAPTER = {"plain": Operators(4, 6, 6, 14), "cast": Operators(6, 6, 9, 14),
           "autocast": Operators(51 / 7, 6, 66 / 7, 14)}  # fmt: skip
ADAPTER_AGAIN = {
    "full": {"plain": Operators(26 / 7, 6, 0, 8), "cast": Operators(39 / 7, 6, 0, 8),
             "autocast": Operators(7, 6, 0, 8)},
    "selective": {"plain": Operators(12 / 7, 8, 0, 8), "cast": Operators(25 / 7, 8, 0, 8),
                  "autocast": Operators(5, 8, 0, 8)},
}  # fmt: skip
# Packed weights are unpacked by an operator of their own before each product, and nothing transposes them.
UNPACKED, UNPACKED_AGAIN = Operators(1, -1, 1, -1), Operators(0, -2, 1, 1)
# GPTQ's are unpacked by four operators for the zeros and five for the weight, forward and where it is recomputed
# (formulas/gptq.py), and a bias is added by one more; under autocast what was multiplied is cast to the input's dtype,
# and its gradient back.
GPTQ, GPTQ_BIAS, GPTQ_AUTOCAST = Operators(9, 9, 0, 0), Operators(1, 0, 0, 0), Operators(1, 0, 1, 0)
ADAPTER_DROPOUT, ADAPTER_DROPOUT_AGAIN = Operators(1, 0, 1, 0), Operators(1, 0, 0, 0)

# Seconds that Python takes in a block beside its operators, forward and backward: FSDP2's hooks, which gather and free,
# and DTensor under tensor parallelism (benchmarks/time/block_host.py, torch 2.13, one thread of a Xeon, 2026-11-25).
FSDP2, DTENSOR = (0.7e-3, 1.0e-3), (3.0e-3, 4.8e-3)
# And nanotron's column- and row-parallel layers, autograd functions in Python that call torch.distributed. With one
# sequence of 4,096 tokens on healthy nodes, layers of 1B and 3B models at TP 4 and 8, and of 8B at TP 8, took alike: in
# 31 jobs at least 4.35 to 4.56 ms, at the median 4.5 to 4.9 (benchmarks/time/ultrascale.csv). A block's operators take
# 3.0.
TENSOR_PARALLEL = {"nanotron": 1.5e-3}
# And torch.utils.checkpoint in one that is computed again: the states of generators and of autocast, and hooks for each
# tensor. 0.7 to 1.0 ms on that CPU (benchmarks/time/block_host.py, 2026-11-26); on an H200's host blocks took 1.0 to
# 1.5 ms longer than their operators (llmlab/archive/h200). Between them:
CHECKPOINT = 1.1e-3


def operators(spec: ModelSpec, run: Training) -> Operators:
    """Return the operators of a block in a micro-batch, adapters' left out."""
    norm = "fused-norm" if run.kernels == "fused-norm" else spec.norm
    norms = spec.norms_per_layer - 2 + 2 * spec.qk_norm if norm == "rmsnorm" else 0
    written = (run.attention == "eager") * (2 if spec.kv_heads < spec.heads else 1)
    precision, _, _ = run.precision.rpartition("-")
    stack, whole = stack_of(run).name, whole_again(spec, run)
    kind = "full" if whole else run.checkpointing
    return _operators(norm, stack, run.zero, kind, share_again(spec, run), precision, norms, written, bool(run.lora))


@cache
def _operators(
    norm: str, stack: str, zero: int, checkpointing: str | None, share: float, precision: str, norms: int, written: int,
    frozen: bool,
) -> Operators:  # fmt: skip
    """`share`: of the blocks, that is computed again; less than all in the stacks that are in `OWN` alone. `precision`:
    "mixed", "autocast" or "". `norms`: more than two. `written`: 0 where no scores are written out, 2 where keys are
    repeated before."""
    if stack in OWN:
        once, again = OWN[stack]
        return once.plus(again[checkpointing].times(share)) if checkpointing else once
    counts = [TRANSFORMERS[norm], *[NORM] * norms, *[EAGER, REPEATED][:written]]
    if frozen:
        counts += [FROZEN[norm], *[FROZEN_CASTS] * (precision == "autocast")]
        counts += [FROZEN_AGAIN[norm]] * bool(checkpointing)
    elif precision == "mixed":
        counts.append(Operators(MIXED[norm] + 2 * norms, 0, 0, 0))
    casts, casts_back = AUTOCAST[norm] if precision == "autocast" else (0, 0)
    counts.append(Operators(casts, 0, casts_back, 0))
    if (stack, zero) in STAGES:
        counts.append(STAGES[stack, zero])
    if checkpointing:
        counts += [AGAIN[checkpointing][norm], *[NORM_AGAIN] * norms, *[EAGER_AGAIN, REPEATED_AGAIN][:written]]
        counts.append(Operators(casts, 0, 0, 0))
    return reduce(Operators.plus, counts)


@lru_cache(maxsize=256)
def started(spec: ModelSpec, run: Training) -> Operators:
    """Return the operators of all blocks in a micro-batch, adapters' with them; and of Megatron-LM's other ones."""
    total = operators(spec, run).times(spec.layers)
    if ends := ENDS.get(stack_of(run).name):
        total = total.plus(ends)
    if run.quantization == "gptq":
        total = total.plus(_gptq(spec, run))
    elif run.quantization:
        per_linear = UNPACKED if run.checkpointing is None else UNPACKED.plus(UNPACKED_AGAIN)
        total = total.plus(per_linear.times(sum(linear.count for linear in spec.block_linears)))
    if adapters := sum(linear.count for linear in adapted(spec, run)):
        per_linear = adapter(run)
        if run.lora and run.lora.dropout:
            per_linear = per_linear.plus(ADAPTER_DROPOUT)
            per_linear = per_linear if run.checkpointing is None else per_linear.plus(ADAPTER_DROPOUT_AGAIN)
        total = total.plus(per_linear.times(adapters))
    return total


def _gptq(spec: ModelSpec, run: Training) -> Operators:
    """Return the operators that GPTQ's layers have more than others."""
    per_linear = GPTQ.plus(GPTQ_AUTOCAST) if run.precision.startswith("autocast") else GPTQ
    biased = sum(linear.count for linear in spec.block_linears if linear.bias)
    total = per_linear.times(sum(linear.count for linear in spec.block_linears)).plus(GPTQ_BIAS.times(biased))
    return total.plus(total._replace(kernels_back=0)) if run.checkpointing else total


def adapter(run: Training) -> Operators:
    """Return the operators that a linear layer has more for its adapter, dropout's left out."""
    own = adapter_bytes(run) == PRECISION[run.precision].weights
    kind = "autocast" if run.precision.startswith("autocast") else "plain" if own else "cast"
    return ADAPTER[kind].plus(ADAPTER_AGAIN[run.checkpointing][kind]) if run.checkpointing else ADAPTER[kind]


def summed(spec: ModelSpec, run: Training) -> float:
    """Return the gradients that a step adds to those of earlier micro-batches, an operator each; DeepSpeed and
    Megatron-LM have buffers of their own."""
    return 0.0 if stack_of(run).own_sums else (run.accumulation - 1) / run.pp * trained(spec, run)


@lru_cache(maxsize=256)
def small_kernels(spec: ModelSpec, run: Training) -> float:
    """Return the kernels of a step on one device that are no products: each takes its start besides what it moves. None
    where Liger has made few of them; and of Megatron-LM's layers `MEGATRON` counts no kernels."""
    if run.kernels == "liger" or stack_of(run).own_kernels:
        return 0.0
    if run.compile:
        return run.accumulation / run.pp * spec.layers * written(spec, run) + summed(spec, run)
    operators_ = started(spec, run)
    small = max(0.0, operators_.kernels + operators_.kernels_back - _multiplied(spec, run))
    return run.accumulation / run.pp * small + summed(spec, run)


def written(spec: ModelSpec, run: Training) -> float:
    """Return the kernels that Inductor writes for a block in a micro-batch. Recomputation casts weights again; the rest
    of it goes into the kernels of backward, but for one or two."""
    kernels = float(sum(WRITTEN[spec.norm]))
    if run.precision.startswith("autocast"):
        casts, casts_back = WRITTEN_CASTS[spec.norm]
        kernels += casts_back + casts * (1 + whole_again(spec, run))
    return kernels


def parameters(spec: ModelSpec) -> float:
    """Return the tensors of parameters: blocks', embedding, last norm and head."""
    hooks = hook_modules(spec)
    return spec.layers * (hooks.whole + hooks.gathered) + (2 if spec.tied else 3)


def trained(spec: ModelSpec, run: Training) -> float:
    """Return the tensors that have a gradient."""
    return 2 * sum(linear.count for linear in adapted(spec, run)) if run.lora else parameters(spec)


def update_host_seconds(spec: ModelSpec, run: Training, host: Efficiency) -> float:
    """Return the seconds the CPU takes for one device's update, tensor by tensor, and for what else a step of
    Megatron-LM or DeepSpeed has beside its passes."""
    tensors, own = trained(spec, run), UPDATES.get(stack_of(run).name)
    count = own(spec, run, tensors) if own else UPDATED * tensors / run.pp
    return count * HERE * hook_spread(host)


def compiled_kernels(spec: ModelSpec, run: Training) -> float:
    """Return the kernels that compiled blocks start in a micro-batch: products, attention, and what Inductor writes."""
    attention = 2 + whole_again(spec, run)
    return _multiplied(spec, run) + spec.layers * (attention + written(spec, run))


def _multiplied(spec: ModelSpec, run: Training) -> int:
    """Return the products of all blocks in a micro-batch."""
    return sum(one.forward + one.again + one.input_gradient + one.weight_gradient for one in products(spec, run)
               if one.part in ("attention", "mlp", "adapters"))  # fmt: skip


@lru_cache(maxsize=256)
def host_seconds(spec: ModelSpec, run: Training, host: Efficiency) -> float:
    """Return the seconds the CPU takes to start the operators of one device's forward and backward passes, or the
    kernels of compiled blocks, and for hooks between them; none where one CUDA graph has them all."""
    if stack_of(run).cuda_graph_impl:
        return 0.0
    adding = summed(spec, run) * host.dispatch * host.backward_dispatch
    if run.compile:
        graphs = run.accumulation / run.pp * compiled_kernels(spec, run) * COMPILED
        return graphs + hook_seconds(spec, run, host) + adding
    seconds = started(spec, run).seconds(host)
    if by_bitsandbytes(run):
        quantized = sum(linear.count for linear in spec.block_linears)
        seconds += quantized * (3 if run.checkpointing == "full" else 2) * host.custom
    passes = run.accumulation * seconds / run.pp + adding
    return passes + hook_seconds(spec, run, host) + python_seconds(spec, run)


def generation_host_seconds(spec: ModelSpec, host: Efficiency) -> float:
    """Return the seconds that the CPU needs to launch one token of transformers' generate()."""
    norms = spec.norms_per_layer - 2 + 2 * spec.qk_norm if spec.norm == "rmsnorm" else 0
    block = GENERATING[spec.norm].plus(GENERATING_NORM.times(norms))
    return UNRECORDED * block.times(spec.layers).plus(GENERATING_ENDS[spec.norm]).seconds(host)


@lru_cache(maxsize=256)
def hook_modules(spec: ModelSpec) -> Hooks:
    """Return a block's modules that run, and how many parameters, of these, stay whole and are gathered: norms' and
    biases, and matrices, where the threshold is DeepSpeed's (stage3_param_persistence_threshold)."""
    blocks = [linear for linear in spec.linears if linear.part != "head"]
    matrices = sum(linear.count for linear in blocks) / spec.layers
    biases = sum(linear.count for linear in blocks if linear.bias) / spec.layers
    norms = spec.norms_per_layer + 2 * spec.qk_norm
    around = 6 if spec.family == "gpt2" else 4  # the block, attention, MLP and its activation; GPT-2's two dropouts
    return Hooks(matrices + norms + around, norms * (2 if spec.norm == "layernorm" else 1) + biases, matrices)


def hook_spread(host: Efficiency) -> float:
    """Return by what factor the seconds of hooks may be less, or more, than `hook_seconds`.

    They start few kernels, and `host` takes longer for an operator than the CPU on which they were timed beside one,
    because it launches a kernel, and because it is slower; nobody has said by how much it is which. It takes from as
    many seconds as that CPU to as many operators'.
    """
    return sqrt(host.dispatch / HERE)


@lru_cache(maxsize=256)
def hook_seconds(spec: ModelSpec, run: Training, host: Efficiency) -> float:
    """Return the seconds of DeepSpeed's hooks in a step, which it has at ZeRO-3, and of what a compiled graph does for
    each parameter: the middle, in logarithms, of what `hook_spread` says. Recomputation runs forward's hooks again."""
    if run.compile:
        count = GUARDED * parameters(spec) + RETURNED * trained(spec, run)
        return run.accumulation / run.pp * count * HERE * hook_spread(host)
    if run.zero != 3 or not stack_of(run).own_zero:
        return 0.0
    again = 2 if run.checkpointing else 1
    hooks = (number * (again * forward + backward)
            for number, forward, backward in zip(hook_modules(spec), FORWARD, BACKWARD, strict=True))  # fmt: skip
    return run.accumulation * spec.layers * sum(hooks) * HERE * hook_spread(host)


def python_seconds(spec: ModelSpec, run: Training) -> float:
    """Return the seconds that checkpointing, FSDP2 and DTensor take the CPU in the passes of one device's blocks.
    DTensor finds out for every operator how its tensors are laid out and what must be sent, a compiler once; stacks
    that divide layers themselves, as Megatron-LM does, have none."""
    if run.compile:
        return 0.0
    again = share_again(spec, run)
    seconds = CHECKPOINT * again
    if stack_of(run).counts_hooks:
        seconds += sum(FSDP2) if run.zero == 3 else 0.0
        if run.tp > 1:
            seconds += sum(DTENSOR) + DTENSOR[0] * again
    if run.tp > 1:
        seconds += TENSOR_PARALLEL.get(stack_of(run).name, 0.0)
    return run.accumulation * spec.layers / run.pp * seconds
