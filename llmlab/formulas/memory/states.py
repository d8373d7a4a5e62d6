"""Weights, gradients and optimizer states on one device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.parameters import Linear
from ...specs.run import Training, stack_of
from ...specs.stages import layers_of
from .. import gptq, newton_schulz
from .fsdp import NONE, Parts, Units, is_flat, sharded_experts, units, uses_fsdp
from .precision import NF4_BLOCK, PRECISION, Bytes, state_bytes, weight_bytes
from .segments import slack
from .share import adapted, adapter_bytes, by_bitsandbytes, frozen_in_half, stored_in
from .stacks.torchtune import nf4tensor


class States(NamedTuple):
    """Bytes on one device of weights and optimizer states, which stay during training, and of the gradients of a
    step."""

    weights: int
    gradients: int
    optimizer: int
    trained: int  # parameters that this device's optimizer updates
    shard: int  # weights of an FSDP2 shard; with zero=2, whole weights exist too
    units: Units


@lru_cache(maxsize=1 << 14)
def device_parameters(
    spec: ModelSpec, layers: tuple[int, ...], stage: int, tp: int = 1, expert_ranks: int = 1
) -> dict[str, int]:
    """Return the parameters by component on one rank of pipeline stage `stage`, before ZeRO. `layers` are those of each
    stage, and `expert_ranks` ranks divide the experts of a layer. Do not modify the result, because it is cached."""
    first, last = stage == 0, stage == len(layers) - 1
    counts = {}
    for part, count in spec.parameters_by_component.items():
        if part == "embedding":  # a tied head on another stage is a second copy
            counts[part] = count // tp if first or (spec.tied and last) else 0
        elif part == "positions":
            counts[part] = count if first else 0
        elif part == "head":
            counts[part] = count // tp if last else 0
        else:
            split = {"attention": tp, "mlp": tp, "experts": expert_ranks}.get(part, 1)
            counts[part] = count * layers[stage] // spec.layers // split
    return counts


def stored_bytes(spec: ModelSpec, dtype: str, parameters: int, width: int) -> int:
    """Return the bytes of `parameters` of a model. The linear layers of blocks are in `dtype`, and the others have
    `width` bytes per parameter. bitsandbytes and GPTQ quantize every linear layer except the head; GPTQ's scales have
    `width` bytes too."""
    rest = width * (parameters - spec.block_linear_elements)
    if dtype == "gptq":
        return rest + sum(linear.count * sum(gptq.tensors(linear.inputs, linear.outputs, width))
                          for linear in spec.block_linears)  # fmt: skip
    rows = sum(linear.count * linear.outputs for linear in spec.block_linears)
    return rest + weight_bytes(dtype, spec.block_linear_elements, rows)


def _weights(spec: ModelSpec, run: Training, counts: dict[str, int], b: Bytes) -> Parts:
    """Return the bytes of the model's own weights, without adapters.

    transformers' experts are three-dimensional parameters, which bitsandbytes does not quantize. peft's
    prepare_model_for_kbit_training casts weights that are not quantized to fp32, except with GPTQ, and except the
    run's `half_layers`.
    """
    experts = counts["experts"]
    dense = sum(counts.values()) - experts
    if run.quantization is None:
        return Parts(experts * b.weights, dense * b.weights)
    whole = spec.parameters - spec.parameters_by_component["experts"]
    width = adapter_bytes(run) if by_bitsandbytes(run) and not frozen_in_half(run) else b.weights
    stored = stored_bytes(spec, _format(run), whole, width)
    if run.half_layers == "embeddings":
        stored -= 2 * (spec.parameters_by_component["embedding"] + spec.parameters_by_component["head"])
    return Parts((2 if frozen_in_half(run) else 4) * experts, stored * dense // whole)


def _format(run: Training) -> str:
    """Return the format of quantized weights: torchao's NF4Tensor always quantizes its scales too."""
    assert run.quantization is not None
    return "nf4-double" if run.double_quant or stack_of(run).torchao_nf4 else run.quantization


def _shard(spec: ModelSpec, run: Training, whole: Parts, zero: int) -> int:
    """Return one rank's shard of an amount that ZeRO divides; all of it without ZeRO (`zero` 0).

    Context-parallel ranks have the same parameters, so ZeRO divides them among these ranks too (TorchTitan's mesh
    dp_shard_cp; Megatron-Core's data-parallel group with context parallel). Expert parallelism has already divided the
    experts among ep ranks.
    """
    if not zero:
        return whole.total
    return int(whole.experts * sharded_experts(spec, run)) + whole.dense // (run.dp_shard * run.cp)


@lru_cache(maxsize=1024)
def states(spec: ModelSpec, run: Training, stage: int = 0, sharded: bool = True) -> States:
    """Return the weights, gradients and optimizer states of one device of pipeline stage `stage`; with `sharded` False,
    those of all ZeRO ranks together.

    ZeRO (arXiv 1910.02054, section 5): stage 1 divides the optimizer states (and the master weights) by dp, stage 2
    also the gradients, stage 3 also the weights. Offloaded states are not on the device, and only one gradient at a
    time is, because each is sent to the host when the backward pass has computed it (ZeRO-Offload, arXiv 2101.06840,
    section 4.1). """
    b, zero = stored_in(run), run.zero if sharded else 0
    counts = device_parameters(spec, layers_of(spec, run), stage, run.tp, run.expert_tp * run.ep)
    parameters = sum(counts.values())
    weights = _weights(spec, run, counts, b)
    # FSDP2's MixedPrecisionPolicy has fp32 shards and gathers weights in 16 bits.
    widening = 2 if run.lora and b.master and zero >= 2 and uses_fsdp(run) else 1
    shard = _shard(spec, run, Parts(widening * weights.experts, widening * weights.dense), zero)
    if run.lora:
        trained = Parts(0, int(adapter_parameters(spec, run) * parameters / spec.parameters))
        gradient = state = adapter_bytes(run)
        master = 0
        adapters = Parts(0, gradient * trained.dense)
        weights = Parts(weights.experts, weights.dense + adapters.dense)
        shard += _shard(spec, run, adapters, zero)
    else:
        trained = Parts(counts["experts"], parameters - counts["experts"])
        gradient, master, state = b.gradients, b.master, b.states
    stepped = _shard(spec, run, trained, zero)
    if zero == 1 and not b.master and not run.lora:
        # torch's ZeroRedundancyOptimizer assigns whole tensors to ranks (_partition_parameters), the largest to rank 0.
        stepped = max(stepped, largest_tensor(spec, run, counts))
    if run.offload:  # the largest gradient that waits for its copy to the host
        with_gradients = trained.total // spec.layers if run.lora else largest_tensor(spec, run, counts)
    else:
        with_gradients = stepped if zero >= 2 else trained.total
    optimizer = 0
    if not run.offload:
        factored = 0
        if run.optimizer == "adafactor":
            part = stepped / max(1, trained.total) * parameters / spec.parameters
            factored = int(factored_elements(spec, run) * part)
        elif run.optimizer == "muon":
            factored = newton_schulz.elements(spec, layers_of(spec, run)[stage])
        optimizer = master * stepped + state_bytes(run.optimizer, state, stepped, factored)
        if stack_of(run).paged(run):
            optimizer -= 2 * stepped  # only the scales are in PyTorch's allocator
    resident = _shard(spec, run, weights, zero) if zero == 3 else weights.total
    gathers = zero >= 2 and not stack_of(run).own_zero  # otherwise the stack's step counts gathered weights
    return States(
        weights=0 if run.offload == "optimizer+parameters" else resident,
        gradients=gradient * with_gradients,
        optimizer=optimizer,
        trained=stepped,
        shard=shard,
        units=units(spec, run, b, weights, counts, trained.total, stage) if gathers else NONE,
    )


def kept_weights(run: Training, sizes: States) -> int:
    """Return the bytes of weights that stay from step to step: with FSDP2 a shard. In mixed precision, this shard is
    the fp32 master copy and counts as the optimizer's."""
    if not uses_fsdp(run):
        return sizes.weights
    return 0 if PRECISION[run.precision].master and not run.lora else sizes.shard


def unsplit(spec: ModelSpec, run: Training, stage: int = 0) -> tuple[int, int]:
    """Return the bytes that the allocator adds to tensors that stay because it does not split a block whose rest would
    be small: for weights (in FSDP2's mixed precision the fp32 ones), and for AdamW's two states. Experts do not
    count."""
    b, sharded = stored_in(run), uses_fsdp(run)
    if is_flat(run) or stack_of(run).expandable_segments:
        return 0, 0  # one buffer contains all tensors, or segments can grow
    if (b.master and not sharded) or run.offload == "optimizer+parameters":
        return 0, 0  # the optimizer has its own buffers, or the weights are on the host
    if run.quantization:
        width = 2 if run.half_layers else b.weights
        return _quantizing(spec, _format(run), width, stack_of(run).torchao_nf4), 0
    first, head = stage == 0, stage == run.pp - 1 and not (spec.tied and stage == 0)
    ranks = run.tp * (run.dp_shard * run.cp if sharded else 1)
    made = partial(_made, spec, layers_of(spec, run)[stage], first, head, ranks)
    width = (b.master if not run.lora else 2 * b.weights) if b.master else b.weights
    states = run.optimizer in ("adamw", "adamw-fused") and not (run.lora or run.offload or run.zero == 1)
    return made(width), made(b.states, 2) if states else 0


@lru_cache(maxsize=1 << 12)
def _made(spec: ModelSpec, layers: int, first: bool, head: bool, ranks: int, width: int, tensors: int = 1) -> int:
    """Return the bytes that `tensors` tensors of `width` bytes per element occupy beyond their sizes, for every matrix
    of a stage, from the embedding (`first`) to the `head`. Each matrix is divided among `ranks`."""
    table = spec.vocab * spec.hidden
    sizes = [table] * first + _sizes(spec.block_linears, spec) * layers + [table] * head
    return slack((width * size // ranks,) for size in sizes for _ in range(tensors))


@lru_cache(maxsize=1 << 10)
def _quantizing(spec: ModelSpec, dtype: str, width: int, by_torchao: bool) -> int:
    """Return the bytes that weights quantized to `dtype` occupy beyond their sizes. They are quantized one after
    another, next to an embedding and a head of `width` bytes per element."""
    mlp_first = sorted(spec.block_linears, key=lambda linear: (linear.part != "mlp", linear.name))
    tables, sizes = [width * spec.vocab * spec.hidden] * (2 - spec.tied), _sizes(mlp_first, spec) * spec.layers
    if dtype == "gptq":  # a checkpoint contains quantized weights
        block = [gptq.tensors(linear.inputs, linear.outputs, width) for linear in mlp_first
                 for _ in range(linear.count // spec.layers)]  # fmt: skip
        return slack((size,) for size in (*tables, *chain.from_iterable(block * spec.layers)))
    if by_torchao:
        return slack([*(nf4tensor(size) for size in sizes), *((table,) for table in tables)])
    # transformers first allocates one block for all weights (modeling_utils.py, caching_allocator_warmup). Then it
    # loads and quantizes 16-bit weights in the order of their names (core_model_loading.py, dot_natural_key).
    # bitsandbytes allocates NF4's scales before its codes (backends/cuda/ops.py, _quantize_4bit). Double quantization
    # subtracts their mean and allocates their bytes after that (functional.py, quantize_4bit).
    codes = 1 if dtype == "int8" else 2  # in a byte
    tensors = [(sum(tables) + sum(sizes) // codes, -1), *((table,) for table in tables)]
    for size in sizes:
        scales = 4 * size // NF4_BLOCK
        first, then = () if dtype == "int8" else (scales,), (scales, scales // 4, -4, -2)
        tensors.append((2 * size, *first, size // codes, *(then if dtype == "nf4-double" else ()), -1))
    return slack(tensors)


def _sizes(linears: Iterable[Linear], spec: ModelSpec) -> list[int]:
    """Return the elements of one block's matrices."""
    return [linear.inputs * linear.outputs for linear in linears for _ in range(linear.count // spec.layers)]


def expert_tensor(spec: ModelSpec, run: Training) -> int:
    """Return the elements of the first projections of all experts of a layer, which are one tensor in transformers."""
    return spec.experts * 2 * spec.moe_intermediate * spec.hidden // run.ep


def largest_tensor(spec: ModelSpec, run: Training, counts: dict[str, int]) -> int:
    """Return the elements of the largest parameter on a device with `counts` parameters: the embedding, the head, or a
    matrix of a block."""
    matrices = (linear.inputs * linear.outputs for linear in spec.block_linears)
    return max(counts["embedding"], counts["head"], max(expert_tensor(spec, run), *matrices) // run.tp)


def block_parameters(spec: ModelSpec) -> int:
    """Return the parameters of one block's linears (and experts), averaged over the blocks."""
    by = spec.parameters_by_component
    return sum(by[part] for part in ("attention", "mlp", "experts", "router")) // spec.layers


def adapter_parameters(spec: ModelSpec, run: Training) -> int:
    """Return r · (inputs + outputs) over every targeted linear (LoRA, arXiv 2106.09685, section 4.1)."""
    assert run.lora is not None
    return sum(linear.count * run.lora.rank * (linear.inputs + linear.outputs) for linear in adapted(spec, run))


def factored_elements(spec: ModelSpec, run: Training) -> int:
    """Return rows + columns of every trained matrix, plus every trained vector: Adafactor's second moments."""
    if run.lora:
        rank = run.lora.rank
        return sum(linear.count * (2 * rank + linear.inputs + linear.outputs) for linear in adapted(spec, run))
    matrices = [(linear.inputs, linear.outputs, linear.count) for linear in spec.linears]
    if spec.experts:  # one three-dimensional tensor per projection and layer, factored over its last two axes
        count, width = spec.moe_layers * spec.experts, spec.moe_intermediate
        matrices += [(spec.hidden, 2 * width, count), (width, spec.hidden, count)]
        matrices.append((spec.hidden, spec.experts, spec.moe_layers))  # the router
    if not spec.tied:  # a tied head is the embedding, and the head is among the linears
        matrices.append((spec.hidden, spec.vocab, 1))
    if spec.learned_positions:
        matrices.append((spec.hidden, spec.max_positions, 1))
    in_matrices = sum(rows * columns * count for rows, columns, count in matrices)
    return sum((rows + columns) * count for rows, columns, count in matrices) + spec.parameters - in_matrices
