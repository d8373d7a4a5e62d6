"""Weights, gradients and optimizer states: what one device holds for as long as training lasts."""

from __future__ import annotations

from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stages import stage_layers
from .fsdp import Units, sharded_experts, units, uses_fsdp
from .precision import PRECISION, Bytes, state_bytes, weight_bytes


class States(NamedTuple):
    """What stays on one device for as long as training lasts, in bytes, and the gradients of one step."""

    weights: int
    gradients: int
    optimizer: int
    trained: int  # parameters trained on this device
    shard: int  # weights where FSDP2 keeps no more than its shard: beside whole ones with zero=2
    units: Units


def device_parameters(spec: ModelSpec, pp: int, stage: int, tp: int = 1, ep: int = 1) -> dict[str, int]:
    """Return parameters by component on one rank of stage `stage` of `pp`, before ZeRO."""
    first, last = stage == 0, stage == pp - 1
    layers = stage_layers(spec.layers, pp)[stage]
    counts = {}
    for part, count in spec.parameters_by_component.items():
        if part in ("embedding", "positions"):
            # A tied head is a second copy of the embedding on the last stage.
            held = first or (part == "embedding" and spec.tied and last)
            counts[part] = count // (tp if part == "embedding" else 1) if held else 0
        elif part == "head":
            counts[part] = count // tp if last else 0
        else:
            split = tp if part in ("attention", "mlp", "experts") else 1
            counts[part] = count * layers // spec.layers // (split * (ep if part == "experts" else 1))
    return counts


def _frozen_bytes(spec: ModelSpec, run: Training, counts: dict[str, int], b: Bytes) -> tuple[int, int]:
    """Return the bytes of weights that are not trained, quantized where asked: of experts, and of all else.

    bitsandbytes quantizes every linear but the head, and transformers' experts are three-dimensional parameters, no
    linears; peft's prepare_model_for_kbit_training casts what is not quantized to fp32.
    """
    experts = counts["experts"]
    dense = sum(counts.values()) - experts
    if run.quantization is None:
        return experts * b.weights, dense * b.weights
    quantized = rows = 0
    for linear in spec.linears:
        if linear.part != "head":
            quantized += linear.count * linear.inputs * linear.outputs
            rows += linear.count * linear.outputs
    whole = spec.parameters - spec.parameters_by_component["experts"]
    stored = weight_bytes(run.quantization, quantized, rows) + 4 * (whole - quantized)
    return 4 * experts, stored * dense // whole


def _shard(spec: ModelSpec, run: Training, experts: int, dense: int) -> int:
    """Return what one rank keeps of two amounts that are sharded.

    Context-parallel ranks have the same parameters, and share them too (TorchTitan's mesh dp_shard_cp; Megatron-Core's
    data-parallel group with context parallel). Experts are already spread over ep ranks: only the others hold the same.
    """
    return int(experts * sharded_experts(spec, run)) + dense // (run.dp * run.cp)


def states(spec: ModelSpec, run: Training, stage: int = 0) -> States:
    """Return what one device of pipeline stage `stage` holds of weights, gradients and optimizer states.

    ZeRO (arXiv 1910.02054, section 5): stage 1 divides the optimizer states (and the master copy) by dp, stage 2 also
    the gradients, stage 3 also the weights. What is offloaded is not on the device; of gradients one at a time is, for
    each leaves as backward makes it (ZeRO-Offload, arXiv 2101.06840, section 4.1).
    """
    b = PRECISION[run.precision]
    counts = device_parameters(spec, run.pp, stage, run.tp, run.ep)
    held = sum(counts.values())
    experts, dense = _frozen_bytes(spec, run, counts, b)
    # FSDP2's MixedPrecisionPolicy: fp32 shards, from which half weights are gathered.
    wide = 2 if run.lora and b.master and uses_fsdp(run) else 1
    shard = _shard(spec, run, wide * experts, wide * dense) if run.zero else experts + dense
    if run.lora:
        adapters = int(adapter_parameters(spec, run) * held / spec.parameters)
        trained = (0, adapters)
        gradient, master, state = 4, 0, 4  # peft keeps half adapters in fp32
        dense += 4 * adapters
        shard += _shard(spec, run, 0, 4 * adapters) if run.zero else 4 * adapters
    else:
        trained = (counts["experts"], held - counts["experts"])
        gradient, master, state = b.gradients, b.master, b.states
    stepped = _shard(spec, run, *trained) if run.zero else sum(trained)
    if run.zero == 1 and not b.master and not run.lora:
        # torch's ZeroRedundancyOptimizer deals out whole tensors (_partition_parameters), to rank 0 the largest.
        stepped = max(stepped, largest_tensor(spec, run, counts))
    factored = 0
    if run.optimizer == "adafactor":
        factored = int(factored_elements(spec, run) * stepped / max(1, sum(trained)) * held / spec.parameters)
    weights = _shard(spec, run, experts, dense) if run.zero == 3 else experts + dense
    made = _leaving(spec, run, counts, sum(trained)) if run.offload else stepped if run.zero >= 2 else sum(trained)
    return States(
        weights=0 if run.offload == "optimizer+parameters" else weights,
        gradients=gradient * made,
        optimizer=0 if run.offload else master * stepped + state_bytes(run.optimizer, state, stepped, factored),
        trained=stepped,
        shard=shard,
        units=units(spec, run, b, (experts, dense), counts, sum(trained)),
    )


def largest_tensor(spec: ModelSpec, run: Training, counts: dict[str, int]) -> int:
    """Return the elements of the largest parameter on a device that holds `counts`: the embedding, the head, a matrix
    of a block, or all experts' first projections of a layer, which transformers keeps in one tensor."""
    experts = spec.experts * 2 * spec.moe_intermediate * spec.hidden // run.ep
    blocks = [each.inputs * each.outputs for each in spec.linears if each.part != "head"]
    return max(counts["embedding"], counts["head"], max(experts, *blocks) // run.tp)


def _leaving(spec: ModelSpec, run: Training, counts: dict[str, int], trained: int) -> int:
    """Return the elements of the largest gradient that waits for its way to the host."""
    return trained // spec.layers if run.lora else largest_tensor(spec, run, counts)


def block_parameters(spec: ModelSpec) -> int:
    """Return the parameters of one block's linears (and experts), averaged over the blocks."""
    by = spec.parameters_by_component
    return sum(by[part] for part in ("attention", "mlp", "experts", "router")) // spec.layers


def adapter_parameters(spec: ModelSpec, run: Training) -> int:
    """Return r · (inputs + outputs) over every targeted linear (LoRA, arXiv 2106.09685, section 4.1)."""
    assert run.lora is not None
    return sum(
        linear.count * run.lora.rank * (linear.inputs + linear.outputs)
        for linear in spec.linears
        if linear.name in run.lora.targets
    )


def factored_elements(spec: ModelSpec, run: Training) -> int:
    """Return rows + columns of every trained matrix, plus every trained vector: Adafactor's second moments."""
    if run.lora:
        rank = run.lora.rank
        return sum(
            linear.count * (2 * rank + linear.inputs + linear.outputs)
            for linear in spec.linears
            if linear.name in run.lora.targets
        )
    matrices = [(linear.inputs, linear.outputs, linear.count) for linear in spec.linears]
    if spec.experts:  # one three-dimensional tensor a projection and layer, factored over its last two axes
        count, width = spec.moe_layers * spec.experts, spec.moe_intermediate
        matrices += [(spec.hidden, 2 * width, count), (width, spec.hidden, count)]
        matrices.append((spec.hidden, spec.experts, spec.moe_layers))  # the router
    if not spec.tied:  # a tied head is the embedding, and the head is among the linears
        matrices.append((spec.hidden, spec.vocab, 1))
    if spec.learned_positions:
        matrices.append((spec.hidden, spec.max_positions, 1))
    in_matrices = sum(rows * columns * count for rows, columns, count in matrices)
    return sum((rows + columns) * count for rows, columns, count in matrices) + spec.parameters - in_matrices
