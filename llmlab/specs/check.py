"""Checks that a model, a run and a GPU are compatible, before anything is computed or allocated."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from functools import lru_cache

from ..base.errors import SpecError
from ..base.terms import GPTQ_GROUP
from ..hardware.gpu import EMULATED_BF16, FLASH_ATTENTION_2_CAPABILITY, GPU
from .generic import attentions
from .images import images_of
from .model import ModelSpec
from .run import Inference, Run, Training, stack_of
from .stages import layers_of

HALF = {"fp16", "bf16"}
ALL_LINEAR = ("all-linear",)
# Families whose written formulas are less exact than derived ones, by up to 4 % in memory and 13 % in time
# (benchmarks/results/traces.md of 2026-11-30, before these were derived). Those of Llama and its like are within 1.3 %
# in memory and 4 % in time, and their median is as good.
LESS_EXACT = ("gemma2", "mixtral", "phi3", "qwen3_moe")
# AutoGPTQ's layer packs zeros in groups of this many (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py).
GPTQ_OUTPUTS = 32


def check(spec: ModelSpec, run: Run, gpu: GPU | None = None) -> Run:
    """Return `run` with two defaults resolved: eager attention if no attention was chosen and the model's class has no
    SDPA, and the names of all linear layers except the head for LoRA's "all-linear", as in peft.

    Raises SpecError if the model or the GPU does not support `run`.
    """
    if not isinstance(run, (Training, Inference)):
        kind = type(run).__name__
        raise SpecError(f"run={reprlib.repr(run)} is a {kind}; give a lab.Training(...) or a lab.Inference(...)")
    chosen = "attention" not in vars(run)["unset"] or stack_of(run).own_program
    if not chosen and run.attention not in attentions(spec.family):
        run = replace(run, attention="eager")
    if isinstance(run, Training) and run.lora and run.lora.targets == ALL_LINEAR and spec.has_formulas:
        names = dict.fromkeys(linear.name for linear in spec.block_linears)
        run = replace(run, lora=replace(run.lora, targets=tuple(names)))
    _check_run(spec, run)
    if gpu is not None:
        _check_gpu(run, gpu)
    return run


def has_formulas(spec: ModelSpec, run: Run) -> bool:
    """Whether the written formulas are right for `run` of the model. In a training step, they count all layers as
    layers of average size, which is wrong if some are dense and the others have experts."""
    return spec.has_formulas and not (isinstance(run, Training) and 0 < spec.dense_layers < spec.layers)


def is_derived(spec: ModelSpec, run: Run) -> bool:
    """Whether `lab.estimate` derives the formulas of `run` from the model's code, if that is possible. Where many
    estimates have to be fast, as in `lab.plan`, the written formulas answer, also for families that are less exact."""
    return isinstance(run, Training) and (spec.family in LESS_EXACT or not has_formulas(spec, run))


@lru_cache(maxsize=256)  # one run is usually checked on several GPUs
def _check_run(spec: ModelSpec, run: Run) -> None:
    if not stack_of(run).own_program and run.attention not in (supported := attentions(spec.family)):
        raise SpecError(f"transformers' {spec.family} has no attention={run.attention!r}; use one of "
                        f"{', '.join(supported)}")  # fmt: skip
    if run.seq_len > spec.max_positions and not spec.rotary:
        what = "seq_len" if isinstance(run, Training) else "prompt_len + new_tokens"
        raise SpecError(
            f"{what}={run.seq_len}: {spec.name} has {spec.max_positions} positions; give at most as many "
            "tokens"
        )
    divided = [("tp", "heads", spec.heads)]
    if isinstance(run, Training):
        if run.ep > 1 and not spec.experts:
            raise SpecError(f"ep={run.ep}: {spec.name} has no experts; give ep=1")
        divided += [("cp", "tokens of seq_len", run.seq_len), ("ep", "experts", spec.experts or run.ep)]
    for field, what, size in divided:
        if size % getattr(run, field):
            raise SpecError(
                f"{field}={getattr(run, field)} does not divide the {size} {what} of {spec.name}; give a "
                "divisor"
            )
    if isinstance(run, Training):
        layers_of(spec, run)
        images_of(spec, run)
        if run.pp * run.virtual_stages > spec.layers + 2:  # each has a layer, the embedding or the head
            stages = f"virtual_stages={run.virtual_stages} with pp={run.pp}"
            raise SpecError(
                f"{stages}: {spec.name} has only {spec.layers} layers for so many virtual stages; give "
                "fewer"
            )
        _check_training(spec, run)


def _check_gpu(run: Run, gpu: GPU) -> None:
    for dtype in sorted(dtypes_of(run) & HALF):
        if gpu.peak(dtype) is None:
            other = "fp16, or for training autocast-fp16" if gpu.peak("fp16") else "fp32"
            slow = f", and {EMULATED_BF16}" if dtype == "bf16" else ""
            raise SpecError(f"{gpu.name} has no {dtype} units{slow}; give {other}")
    if isinstance(run, Training) and run.fp8_recipe and gpu.peak("fp8") is None:
        raise SpecError(f"fp8={run.fp8_recipe!r}: {gpu.name} has no fp8 units (NVIDIA GPUs since Ada and Hopper do); "
                        "leave out fp8, or give such a GPU")  # fmt: skip
    if isinstance(run, Training) and run.fp8_recipe == "mxfp8" and (gpu.compute_capability or (0, 0)) < (10, 0):
        raise SpecError(f"fp8_recipe='mxfp8': {gpu.name} has no units for mxfp8 (NVIDIA GPUs since Blackwell do); give "
                        "'delayed', 'tensorwise' or 'blockwise', or such a GPU")  # fmt: skip
    capability, least = gpu.compute_capability, FLASH_ATTENTION_2_CAPABILITY
    if run.attention == "flash" and capability is not None and capability < least:
        raise SpecError(
            f"attention='flash' needs compute capability {'.'.join(map(str, least))}; {gpu.name} has "
            f"{'.'.join(map(str, capability))}; give attention='sdpa'"
        )


def _check_training(spec: ModelSpec, run: Training) -> None:
    stack = stack_of(run)
    if stack.families and spec.family not in stack.families:
        families = ", ".join(stack.families)
        raise SpecError(f"stack={stack.name!r} supports {families} here, not {spec.family}; give another stack")
    stack.check_model(spec, run, layers_of(spec, run))
    if spec.tied and not stack.ties_heads:
        tied = f"{spec.name} ties its head to the embedding"
        raise SpecError(f"{tied}, which stack={stack.name!r} does not support here; give another stack")
    if run.lora and spec.has_formulas:  # for other families, only the real class knows the names
        names = {linear.name for linear in spec.linears}
        if missing := [target for target in run.lora.targets if target not in names]:
            have = ", ".join(sorted(names))
            problem = f"LoRA targets {', '.join(missing)} are not layers of {spec.name}"
            raise SpecError(f"{problem}; give all-linear, or some of {have}")
    if run.fp8_recipe:
        _check_fp8(spec, run)
    if run.quantization == "gptq":
        _check_gptq(spec, run)
    if run.attention == "flash" and run.precision == "fp32":
        raise SpecError("attention='flash' needs fp16 or bf16, and precision='fp32' was given; give attention='sdpa'")


def _check_fp8(spec: ModelSpec, run: Training) -> None:
    """Raise SpecError for layers that torchao cannot convert, or whose shapes fp8 units do not support."""
    if run.fp8 and spec.family == "gpt2":
        raise SpecError(
            f"fp8={run.fp8!r}: torchao converts nn.Linear, but transformers' gpt2 uses Conv1D; leave out "
            "fp8"
        )
    for linear in spec.block_linears:
        sizes = linear.inputs, linear.outputs
        if any(size % (16 * run.tp) for size in sizes):
            shape = f"{linear.name} of {spec.name} is {sizes[0]} × {sizes[1]}"
            no = f"and fp8 needs multiples of {16 * run.tp}"
            raise SpecError(f"fp8={run.fp8_recipe!r} with tp={run.tp}: {shape}, {no}; leave out fp8")


def _check_gptq(spec: ModelSpec, run: Training) -> None:
    """Raise SpecError for runs that AutoGPTQ's layer (formulas/gptq.py) does not support, or that we do not
    describe."""
    gptq = "quantization='gptq' with"
    if run.compile:
        raise SpecError(f"{gptq} compile=True is not supported: how Inductor fuses the unpacking of weights is "
                        "unknown; give one of them")  # fmt: skip
    if run.zero >= 2 or run.tp > 1:
        raise SpecError(f"{gptq} zero={run.zero}, tp={run.tp}: packed weights are buffers, which neither FSDP nor "
                        "parallelize_module shards; give zero=0 and tp=1")  # fmt: skip
    if spec.experts:
        raise SpecError(f"{gptq} {spec.name}: AutoGPTQ packs experts that are separate layers, but transformers "
                        "stores the experts of a layer as one tensor; leave out quantization")  # fmt: skip
    for linear in spec.block_linears:
        if linear.inputs % GPTQ_GROUP or linear.outputs % GPTQ_OUTPUTS:
            raise SpecError(f"{gptq} {spec.name}: {linear.name} is {linear.inputs} × {linear.outputs}, but inputs are "
                            f"packed in groups of {GPTQ_GROUP}, outputs of {GPTQ_OUTPUTS}; leave out "
                            "quantization")  # fmt: skip


def dtypes_of(run: Run) -> set[str]:
    """Return the dtypes that the device must support: that of the matmuls, or those of weights and KV cache."""
    return {run.compute_dtype} if isinstance(run, Training) else {run.weights, run.kv}
