"""CPU seconds for launching the operators of a step's passes on one device; the GPU may have to wait for them.

    host = micro-batches × (blocks × operators of a block + operators outside the blocks) × the time to launch one

Operators are counted, not fitted: the simulator logs those of the stacks' own classes in models of two depths, and the
difference is per block (tests/formulas/test_host.py repeats the count). The time per operator depends on
the host (hardware/efficiencies.toml). It covers Python, the dispatcher and the launch, and is shorter in the backward
pass, where autograd's engine calls the operators.

DeepSpeed's ZeRO-3 runs its own Python code around every module (runtime/zero/parameter_offload.py).
benchmarks/time/deepspeed_hooks.py timed these hooks and operators on the same CPU.

A compiled step needs CPU time, too: its graph launches each kernel from Python, and guards, autograd and the optimizer
need time for each parameter.
"""

from __future__ import annotations

from functools import cache, lru_cache, reduce
from math import sqrt
from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.run import Training, stack_of
from ..again import share_again, whole_again
from ..memory.fsdp import uses_fsdp
from ..memory.precision import PRECISION
from ..memory.share import adapted, adapter_bytes, by_bitsandbytes, frozen_in_half
from .efficiency import Efficiency
from .products import products
from .stacks import deepspeed, megatron


class Operators(NamedTuple):
    """Numbers of a block's operators with a kernel and without one (views), in the forward and the backward pass."""

    kernels: float
    views: float
    kernels_back: float
    views_back: float

    def seconds(self, host: Efficiency) -> float:
        """Return the seconds that `host` needs to launch them."""
        forward = self.kernels * host.dispatch + self.views * host.view
        backward = self.kernels_back * host.dispatch + self.views_back * host.view
        return forward + host.backward_dispatch * backward

    def plus(self, more: Operators) -> Operators:
        """Return the sums of these numbers and those of `more`."""
        return Operators(*(mine + theirs for mine, theirs in zip(self, more, strict=True)))

    def times(self, count: float) -> Operators:
        """Return these numbers multiplied by `count`."""
        return Operators(*(count * mine for mine in self))


class Hooks(NamedTuple):
    """The time of a module's hooks, in operators: per module, and in addition for each of its parameters that stays
    whole, and for each that is gathered."""

    module: float
    whole: float
    gathered: float


# Operators of a block with two norms and fused attention, all in one dtype; torchtitan's block is in mixed precision
# with FSDP2. DeepSpeed's stages 1 and 2 mostly add views of the buffers from which they reduce gradients. Everything
# that stage 3 adds, operators included, is counted as time of its hooks.
TRANSFORMERS = {
    "rmsnorm": Operators(38, 40, 71, 71),
    "fused-norm": Operators(24, 38, 41, 65),
    "layernorm": Operators(19, 21, 31, 43),
}
# Operators outside the blocks in a micro-batch: embedding, last norm, head and loss.
TRANSFORMERS_ENDS = {"rmsnorm": Operators(35, 16, 23, 14), "layernorm": Operators(22, 16, 12, 13)}
# Operators that a router with its experts adds to a block, by family, in the place of an MLP.
EXPERTS = {"mixtral": Operators(19, 4, 24, 4)}
OTHER_EXPERTS = Operators(16, 4, 16, 3)
# Operators that DDP adds per gradient: copies into a bucket and back, and their views.
BUCKETED = Operators(0, 1, 2, 1)
# Operators that FSDP2 adds when it gathers a unit, before its forward pass, and when it reduces its gradients; and a
# view for each parameter in both.
GATHERED, REDUCED, SHARD_VIEW = Operators(4, 5, 0, 0), Operators(0, 0, 2, 3), Operators(0, 1, 0, 1)
# When ZeRO-3 gathers it again, in the backward pass, which also frees it.
GATHERED_AGAIN, SHARD_VIEW_AGAIN = Operators(0, 0, 4, 4), Operators(0, 0, 0, 1)
# Operators that Gemma's norm adds, because it multiplies by 1 + weight in fp32, and a softcap.
WIDE_NORM, SOFTCAP = Operators(2, 1, 1, 2), Operators(3, 0, 3, 0)
# A block of transformers that generates a token in 16 bits with SDPA and a DynamicCache, which concatenates keys and
# values; and per token, outside the blocks: embedding, last norm, head, and generate()'s greedy choice and stop test.
GENERATING = {"rmsnorm": Operators(40, 36, 0, 0), "layernorm": Operators(19, 18, 0, 0)}
GENERATING_ENDS = {"rmsnorm": Operators(36, 11, 0, 0), "layernorm": Operators(22, 12, 0, 0)}
GENERATING_NORM = Operators(8, 0, 0, 0)  # an additional RMSNorm, for example of queries
# The time of an operator that autograd does not record, relative to an operator in a forward pass of training, from
# which `dispatch` was derived: 0.7, the median of 16 rounds from 0.5 to 1.2 on a busy machine
# (benchmarks/time/generation_host.py, torch 2.13, one thread of an EPYC, 2026-11-29).
UNRECORDED = 0.7
# Casts of autocast, of inputs and weights (forward, backward); recomputation repeats the forward ones.
AUTOCAST = {"rmsnorm": (10, 16), "fused-norm": (14, 20), "layernorm": (12, 16)}
# An additional norm, for example of queries; eager attention, which stores its scores; and the repetition of keys and
# values for it. `_AGAIN`: operators that recomputation adds.
NORM, NORM_AGAIN = Operators(8, 1, 16, 4), Operators(8, -1, 0, 11)
EAGER, EAGER_AGAIN = Operators(7, 9, 8, 10), Operators(7, 9, 0, 2)
REPEATED, REPEATED_AGAIN = Operators(2, 6, 2, 4), Operators(2, 6, 0, 0)
TORCHTITAN = Operators(24, 55, 39, 95)
# Operators that take as long as a layer of megatron-core, whose time is mostly Python: 2.1 times a Llama's forward and
# 1.3 times its backward pass (benchmarks/time/megatron_host.py, megatron-core 0.16.1, its own layers).
MEGATRON = Operators(118, 84, 92, 92)
# Operators that take as long as the rest of a micro-batch in Megatron-LM: sending its tensors to tensor-parallel ranks,
# embedding, last norm, head, loss and schedule. This is 93 to 130 operators of a Llama's forward and 64 to 100 of its
# backward pass (as above, whole steps).
MEGATRON_ENDS = Operators(100, 70, 74, 74)
# Operators that a layer with experts adds to `MEGATRON`. With a grouped matmul, it takes 1.65 times a dense layer's
# forward and 1.41 times its backward pass, in five rounds 1.6 to 1.7 and 1.3 to 1.6 (benchmarks/time/megatron_host.py,
# 2026-11-30). `GRAPHED`: the shares of this layer's time that CUDA graphs of modules replace.
MEGATRON_EXPERTS = Operators(77, 55, 38, 38)
GRAPHED = {"attn": 0.35, "moe_router": 0.11, "moe_preprocess": 0.1}
STAGES = {("deepspeed", 1): Operators(10, 50, 0, 0), ("deepspeed", 2): Operators(1, 26, 9, 36)}
# Operators that recomputation adds. It stops at the last tensor that the backward pass needs, before the block's end.
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
# benchmarks/time/deepspeed_hooks.py, DeepSpeed 0.19.8; version 0.12.4, from 2023, agreed within 30 %. It ran on one
# process, because the time of gathering from other ranks is counted as a collective. `HERE`: seconds per operator on
# that CPU.
FORWARD, BACKWARD = Hooks(14, 2, 6), Hooks(7, 8, 24)
HERE = 4.1e-6
# Seconds that a compiled graph needs to launch a kernel: Inductor's launcher, with 19 arguments, on a GB200's host; 6.8
# us without arguments (meta-pytorch/tritonbench, pull request 1017, 2026-04). The graph calls matmuls and attention by
# their operators. We assume that these launch as fast.
COMPILED = 9.1e-6
# Kernels that Inductor generates for a block, forward and backward, and those that autocast adds: casts of weights, and
# of their gradients.
WRITTEN = {"rmsnorm": (5, 9), "layernorm": (3, 8)}
WRITTEN_CASTS = {"rmsnorm": (7, 7), "layernorm": (8, 4)}
# Operators that take as long as a compiled graph's work per parameter: before it starts (guards, the autograd
# function), and for the parameter's gradient; and as torch's AdamW per parameter in an update, fused or foreach
# (benchmarks/time/block_host.py, torch 2.13, 2026-11-26). For Qwen3-8B, guards and arguments took 2.2 us per parameter
# (pytorch/pytorch, issue 191753).
GUARDED, RETURNED, UPDATED = 0.4, 0.8, 0.9
MASTER_CASTS = 2
# With frozen weights, a block computes no gradients of weights, autocast does not cast these, and recomputation has
# fewer views. These numbers are added to those above.
FROZEN = {"rmsnorm": Operators(0, 0, -11, -32), "fused-norm": Operators(0, 0, -7, -30),
          "layernorm": Operators(0, 0, -8, -20)}  # fmt: skip
FROZEN_CASTS = Operators(0, 0, -8, 0)
FROZEN_AGAIN = {"rmsnorm": Operators(0, 0, 0, -36), "fused-norm": Operators(0, 0, 0, -32),
                "layernorm": Operators(0, 0, 0, -24)}  # fmt: skip
# Operators that one of peft's adapters adds to a linear layer: with adapters in the layer's dtype, in another dtype,
# and under autocast. Dropout adds one more in each pass.
ADAPTER = {"plain": Operators(4, 6, 6, 14), "cast": Operators(6, 6, 9, 14),
           "autocast": Operators(51 / 7, 6, 66 / 7, 14)}  # fmt: skip
ADAPTER_AGAIN = {
    "full": {"plain": Operators(26 / 7, 6, 0, 8), "cast": Operators(39 / 7, 6, 0, 8),
             "autocast": Operators(7, 6, 0, 8)},
    "selective": {"plain": Operators(12 / 7, 8, 0, 8), "cast": Operators(25 / 7, 8, 0, 8),
                  "autocast": Operators(5, 8, 0, 8)},
}  # fmt: skip
# One operator unpacks packed weights before each matmul, and no view transposes them.
UNPACKED, UNPACKED_AGAIN = Operators(1, -1, 1, -1), Operators(0, -2, 1, 1)
# With `double_quant`, the scales are unpacked before that, and their mean is added (bitsandbytes/functional.py,
# dequantize_4bit).
UNPACKED_SCALES, UNPACKED_SCALES_AGAIN = Operators(2, 0, 2, 0), Operators(0, 0, 2, 0)
# GPTQ's weights are unpacked by four operators for the zeros and five for the weight, in the forward pass and in its
# recomputation (formulas/gptq.py). A bias is added by one more. Under autocast, the result of the matmul is cast to the
# input's dtype, and its gradient back.
GPTQ, GPTQ_BIAS, GPTQ_AUTOCAST = Operators(9, 9, 0, 0), Operators(1, 0, 0, 0), Operators(1, 0, 1, 0)
ADAPTER_DROPOUT, ADAPTER_DROPOUT_AGAIN = Operators(1, 0, 1, 0), Operators(1, 0, 0, 0)

# Seconds of Python in a block in addition to its operators, forward and backward: FSDP2's hooks, which gather and free
# weights, and DTensor under tensor parallelism (benchmarks/time/block_host.py, torch 2.13, one thread of a Xeon,
# 2026-11-25).
FSDP2, DTENSOR = (0.7e-3, 1.0e-3), (3.0e-3, 4.8e-3)
# The same for nanotron's column- and row-parallel layers, autograd functions in Python that call torch.distributed.
# With one sequence of 4,096 tokens on healthy nodes, layers of 1B and 3B models at TP 4 and 8, and of 8B at TP 8, took
# about equally long: in 31 jobs at least 4.35 to 4.56 ms, with medians of 4.5 to 4.9 (benchmarks/time/ultrascale.csv).
# A block's operators account for 2.5.
TENSOR_PARALLEL = {"nanotron": 2.0e-3}
# The same for torch.utils.checkpoint in a recomputed block: it saves and restores the states of random generators and
# of autocast, and has hooks for each tensor. They took 0.7 to 1.0 ms on that CPU (benchmarks/time/block_host.py,
# 2026-11-26). On an H200's host, blocks took 1.0 to 1.5 ms longer than their operators (llmlab/archive/h200). This
# value lies between the two:
CHECKPOINT = 1.1e-3


def operators(spec: ModelSpec, run: Training) -> Operators:
    """Return the operators of a block in a micro-batch, without those of adapters."""
    norm = "fused-norm" if run.kernels == "fused-norm" else spec.norm
    norms = spec.norms_per_layer - 2 + 2 * spec.qk_norm if norm == "rmsnorm" else 0
    written = (run.attention == "eager") * (2 if spec.kv_heads < spec.heads else 1)
    precision = "" if frozen_in_half(run) else run.precision.rpartition("-")[0]
    stack, whole = stack_of(run).name, whole_again(spec, run)
    kind = "full" if whole else run.checkpointing
    return _operators(norm, stack, run.zero, kind, share_again(spec, run), precision, norms, written, bool(run.lora))


@cache
def _operators(
    norm: str, stack: str, zero: int, checkpointing: str | None, share: float, precision: str, norms: int, written: int,
    frozen: bool,
) -> Operators:  # fmt: skip
    """Return the operators of a block, from its cacheable settings.

    `share`: the fraction of blocks that is recomputed, which is less than 1 only for the stacks in `OWN`. `precision`:
    "mixed", "autocast" or "". `norms`: how many there are beyond two. `written`: 0 if no scores are stored, 1 if they
    are, 2 if keys are also repeated.
    """
    if stack in OWN:
        once, again = OWN[stack]
        return once.plus(again[checkpointing].times(share)) if checkpointing else once
    counts = [TRANSFORMERS[norm], *[NORM] * norms, *[EAGER, REPEATED][:written]]
    if frozen:
        counts += [FROZEN[norm], *[FROZEN_CASTS] * (precision == "autocast")]
        counts += [FROZEN_AGAIN[norm]] * bool(checkpointing)
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
    """Return the operators of all blocks in a micro-batch, including those of adapters, and those outside the blocks if
    the model is transformers' or Megatron-LM's."""
    total = operators(spec, run).times(spec.layers)
    if ends := ENDS.get(stack_of(run).name):
        total = total.plus(MEGATRON_EXPERTS.times(spec.moe_layers))
        if stack_of(run).cuda_graph_impl:
            total = total.times(1 - sum(GRAPHED[module] for module in stack_of(run).cuda_graph_modules))
        total = total.plus(ends)
    elif not stack_of(run).own_model:
        total = total.plus(TRANSFORMERS_ENDS[spec.norm]).plus(_of_family(spec, run))
    if run.quantization == "gptq":
        total = total.plus(_gptq(spec, run))
    elif run.quantization:
        per_linear, again = UNPACKED, UNPACKED_AGAIN
        if run.double_quant:
            per_linear, again = per_linear.plus(UNPACKED_SCALES), again.plus(UNPACKED_SCALES_AGAIN)
        per_linear = per_linear.plus(again) if run.checkpointing else per_linear
        total = total.plus(per_linear.times(sum(linear.count for linear in spec.block_linears)))
    if adapters := sum(linear.count for linear in adapted(spec, run)):
        per_linear = adapter(run)
        if run.lora and run.lora.dropout:
            per_linear = per_linear.plus(ADAPTER_DROPOUT)
            per_linear = per_linear if run.checkpointing is None else per_linear.plus(ADAPTER_DROPOUT_AGAIN)
        total = total.plus(per_linear.times(adapters))
    return total


def forward_share(spec: ModelSpec, run: Training, host: Efficiency) -> float:
    """Return the part of the CPU's time for launching the passes that is for the forward pass."""
    total = started(spec, run)
    return total._replace(kernels_back=0, views_back=0).seconds(host) / total.seconds(host)


def _of_family(spec: ModelSpec, run: Training) -> Operators:
    """Return the operators of all blocks that a plain transformer lacks: those of experts and of Gemma."""
    again = 1 + share_again(spec, run)
    total = Operators(0, 0, 0, 0)
    if spec.experts:
        total = total.plus(_repeated(EXPERTS.get(spec.family, OTHER_EXPERTS).times(spec.moe_layers), again))
    if spec.family == "gemma2":
        total = total.plus(_repeated(WIDE_NORM.times(spec.norms_per_layer * spec.layers), again))
    if spec.attention_softcap and run.attention == "eager":
        total = total.plus(_repeated(SOFTCAP.times(spec.layers), again))
    return total.plus(SOFTCAP) if spec.logit_softcap else total


def _repeated(once: Operators, times: float) -> Operators:
    """Return the operators if the forward pass runs `times` times."""
    return once._replace(kernels=times * once.kernels, views=times * once.views)


def _gptq(spec: ModelSpec, run: Training) -> Operators:
    """Return the operators that GPTQ's layers have in addition to those of other linear layers."""
    per_linear = GPTQ.plus(GPTQ_AUTOCAST) if run.precision.startswith("autocast") else GPTQ
    biased = sum(linear.count for linear in spec.block_linears if linear.bias)
    total = per_linear.times(sum(linear.count for linear in spec.block_linears)).plus(GPTQ_BIAS.times(biased))
    return total.plus(total._replace(kernels_back=0)) if run.checkpointing else total


def adapter(run: Training) -> Operators:
    """Return the operators that an adapter adds to a linear layer, without dropout."""
    own = adapter_bytes(run) == PRECISION[run.precision].weights
    kind = "autocast" if run.precision.startswith("autocast") else "plain" if own else "cast"
    return ADAPTER[kind].plus(ADAPTER_AGAIN[run.checkpointing][kind]) if run.checkpointing else ADAPTER[kind]


def summed(spec: ModelSpec, run: Training) -> float:
    """Return the number of gradients that a step adds to those of earlier micro-batches, with one operator each. It is
    0 for stacks with their own buffers (DeepSpeed and Megatron-LM)."""
    return 0.0 if stack_of(run).own_sums else (run.accumulation - 1) / run.pp * trained(spec, run)


@lru_cache(maxsize=256)
def small_kernels(spec: ModelSpec, run: Training) -> float:
    """Return the number of a step's kernels on one device that are not matmuls. Each needs time to start in addition to
    the time for its bytes. It is 0 with Liger, which leaves few of them, and for Megatron-LM, because `MEGATRON` counts
    time, not kernels."""
    if run.kernels == "liger" or stack_of(run).own_kernels:
        return 0.0
    if run.compile:
        return run.accumulation / run.pp * spec.layers * written(spec, run) + summed(spec, run)
    operators_ = started(spec, run)
    small = max(0.0, operators_.kernels + operators_.kernels_back - _multiplied(spec, run))
    return run.accumulation / run.pp * small + summed(spec, run)


def written(spec: ModelSpec, run: Training) -> float:
    """Return the number of kernels that Inductor generates for a block in a micro-batch. Recomputation casts weights
    again; all but one or two of its other operators are fused into kernels of the backward pass."""
    kernels = float(sum(WRITTEN[spec.norm]))
    if run.precision.startswith("autocast"):
        casts, casts_back = WRITTEN_CASTS[spec.norm]
        kernels += casts_back + casts * (1 + whole_again(spec, run))
    return kernels


def parameters(spec: ModelSpec) -> float:
    """Return the number of parameter tensors: those of blocks, embedding, last norm and head."""
    hooks = hook_modules(spec)
    return spec.layers * (hooks.whole + hooks.gathered) + (2 if spec.tied else 3)


def trained(spec: ModelSpec, run: Training) -> float:
    """Return the number of tensors that have a gradient."""
    return 2 * sum(linear.count for linear in adapted(spec, run)) if run.lora else parameters(spec)


def update_host_seconds(spec: ModelSpec, run: Training, host: Efficiency) -> float:
    """Return the CPU seconds of one device's update, tensor by tensor, and for Megatron-LM or DeepSpeed of everything
    else that a step does outside its passes."""
    tensors, own = trained(spec, run), UPDATES.get(stack_of(run).name)
    # With a master copy, a gradient is cast before its update, and the weight after it, if FSDP2 does not cast them.
    casts = MASTER_CASTS if PRECISION[run.precision].master and not run.lora and not uses_fsdp(run) else 0
    if own:
        return own(spec, run, tensors) * HERE * hook_spread(host)
    return tensors / run.pp * (UPDATED * HERE * hook_spread(host) + casts * host.dispatch)


def compiled_kernels(spec: ModelSpec, run: Training) -> float:
    """Return the number of kernels that compiled blocks launch in a micro-batch: matmuls, attention, and those that
    Inductor generates."""
    attention = 2 + whole_again(spec, run)
    return _multiplied(spec, run) + spec.layers * (attention + written(spec, run))


def _multiplied(spec: ModelSpec, run: Training) -> int:
    """Return the number of matmuls of all blocks in a micro-batch."""
    return sum(one.forward + one.again + one.input_gradient + one.weight_gradient for one in products(spec, run)
               if one.part in ("attention", "mlp", "adapters"))  # fmt: skip


@lru_cache(maxsize=256)
def host_seconds(spec: ModelSpec, run: Training, host: Efficiency) -> float:
    """Return the CPU seconds for launching the operators of one device's forward and backward passes, or the kernels of
    compiled blocks, and for the hooks between them. They are 0 if one CUDA graph contains all passes."""
    if stack_of(run).cuda_graph_impl == "full_iteration":
        return 0.0
    adding = summed(spec, run) * host.dispatch * host.backward_dispatch
    if run.compile:
        graphs = run.accumulation / run.pp * compiled_kernels(spec, run) * COMPILED
        return graphs + hook_seconds(spec, run, host) + adding
    seconds = started(spec, run).seconds(host)
    if run.dp > 1 and not run.zero and not (stack_of(run).own_model or stack_of(run).own_sums):
        adding += trained(spec, run) / run.pp * BUCKETED.seconds(host)
    if uses_fsdp(run) and not stack_of(run).own_model:
        adding += _fsdp_operators(spec, run).seconds(host) / run.pp
    if by_bitsandbytes(run):
        quantized = sum(linear.count for linear in spec.block_linears)
        seconds += quantized * (3 if run.checkpointing == "full" else 2) * host.custom
    passes = run.accumulation * seconds / run.pp + adding
    return passes + hook_seconds(spec, run, host) + python_seconds(spec, run)


def _fsdp_operators(spec: ModelSpec, run: Training) -> Operators:
    """Return the operators that FSDP2 adds to a step: its units are the blocks and the rest of the model."""
    unit, view = GATHERED.plus(REDUCED), SHARD_VIEW
    if run.zero == 3:
        unit, view = unit.plus(GATHERED_AGAIN), view.plus(SHARD_VIEW_AGAIN)
    return unit.times(spec.layers + 1).plus(view.times(parameters(spec))).times(run.accumulation)


def generation_host_seconds(spec: ModelSpec, host: Efficiency) -> float:
    """Return the seconds that the CPU needs to launch one token of transformers' generate()."""
    norms = spec.norms_per_layer - 2 + 2 * spec.qk_norm if spec.norm == "rmsnorm" else 0
    block = GENERATING[spec.norm].plus(GENERATING_NORM.times(norms))
    return UNRECORDED * block.times(spec.layers).plus(GENERATING_ENDS[spec.norm]).seconds(host)


@lru_cache(maxsize=256)
def hook_modules(spec: ModelSpec) -> Hooks:
    """Return the number of a block's modules, of their parameters that stay whole (norms and biases), and of those that
    are gathered (matrices), with DeepSpeed's own threshold (stage3_param_persistence_threshold)."""
    blocks = [linear for linear in spec.linears if linear.part != "head"]
    matrices = sum(linear.count for linear in blocks) / spec.layers
    biases = sum(linear.count for linear in blocks if linear.bias) / spec.layers
    norms = spec.norms_per_layer + 2 * spec.qk_norm
    around = 6 if spec.family == "gpt2" else 4  # the block, attention, MLP and its activation; GPT-2's two dropouts
    return Hooks(matrices + norms + around, norms * (2 if spec.norm == "layernorm" else 1) + biases, matrices)


def hook_spread(host: Efficiency) -> float:
    """Return the factor by which the seconds of hooks may be below, or above, `hook_seconds`.

    Hooks launch few kernels. An operator takes longer on `host` than on the CPU of the benchmark, because it launches a
    kernel, and because `host` is slower. No measurement separates the two reasons. So the hooks take at least as many
    seconds as on that CPU, and at most as long as the same number of operators on `host`.
    """
    return sqrt(host.dispatch / HERE)


@lru_cache(maxsize=256)
def hook_seconds(spec: ModelSpec, run: Training, host: Efficiency) -> float:
    """Return the seconds of DeepSpeed's hooks in a step with ZeRO-3, or of a compiled graph's work for each parameter:
    the geometric mean of the limits that `hook_spread` explains. Recomputation runs the hooks of the forward pass
    again."""
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
    """Return the CPU seconds of checkpointing, FSDP2 and DTensor in the passes of one device's blocks.

    For every operator, DTensor derives the layout of its tensors and the necessary communication; a compiler does this
    only once. Stacks that divide layers themselves, for example Megatron-LM, do not need DTensor.
    """
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
