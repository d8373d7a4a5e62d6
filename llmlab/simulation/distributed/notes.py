"""Notes of a report on a run over several ranks: the engine it uses, and memory that is not counted."""

from __future__ import annotations

from ...base.notes import Note
from ...base.units import show_bytes
from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.run import Run, Training, stack_of
from ...specs.stacks import Megatron
from ...step.ranks import is_sharded

ENGINES = {
    0: "DistributedDataParallel with torch's defaults, whose buckets need as many bytes as the gradients",
    1: "DistributedDataParallel with ZeroRedundancyOptimizer, torch's ZeRO-1",
    2: "FSDP2 with reshard_after_forward=False, which keeps gathered blocks from forward to backward",
    3: "FSDP2 (fully_shard): each block is one unit, and the rest of the model another",
}
MEGATRON_NOTE = Note("engine", "The layers are megatron-core's; Apex's kernels are simulated by what they allocate.")
MEGATRON_ALONE_NOTE = Note("engine", "The layers are megatron-core's; norm, softmax and AdamW are PyTorch's.")
NO_NCCL_NOTE = Note("nccl-unknown", "NCCL's buffers are not counted, because they are outside PyTorch's allocator; so "
                    "`process` is unknown.")  # fmt: skip


def notes(spec: ModelSpec, run: Run, gpu: GPU | None) -> tuple[Note, ...]:
    """Return the notes on a run on several ranks of `gpu`; None means the CPU, which has no NCCL."""
    if not isinstance(run, Training):
        return ()
    if stack_notes := OWN.get(stack_of(run).name):
        return (*stack_notes(run), *(_nccl(gpu) if run.world_size > 1 else ()))
    if run.world_size == 1:
        return ()
    notes: list[Note] = []
    if run.pp > 1:
        schedule = "torchtitan's split and the schedules and buffers of torch.distributed.pipelining"
        notes.append(Note("pipeline", f"Rank 0 of pp={run.pp}: {schedule}."))
    if run.dp > 1:
        notes.append(Note("engine", f"Rank 0 of {ENGINES[run.zero]}."))
    if run.dp_replicate > 1:
        shared = f"HSDP: {run.dp_replicate} copies, each sharded over {run.dp_shard} ranks"
        notes.append(Note("sharded-copies", f"{shared}; an all-reduce sums a shard's gradients over the copies."))
    if is_sharded(run) and run.precision.startswith("mixed"):
        policy = f"{run.precision} is FSDP2's MixedPrecisionPolicy: fp32 shards are gathered in half precision"
        update = "the optimizer is torch's foreach version"
        notes.append(Note("mixed-precision", f"{policy}, and gradients are reduced in {run.reduce_dtype}; {update}."))
    if is_sharded(run) and 0 < spec.experts < run.dp_shard:
        few = f"FSDP2 shards a layer's {spec.experts} experts along dimension 0, so only {spec.experts} of the"
        other = "A shard_placement_fn that shards another dimension divides them among all ranks."
        notes.append(Note("few-experts", f"{few} {run.dp_shard} ranks hold one, and gathering pads the rest. {other}"))
    if is_sharded(run) and run.accumulation > 1 and run.pp == 1:
        when = "each" if run.sync_each_batch else "the last"
        local = "" if run.sync_each_batch else "; until then each rank accumulates unsharded gradients"
        reduces = f"FSDP2 reduces gradients after {when} of the {run.accumulation} micro-batches"
        notes.append(Note("gradient-sync", f"{reduces}{local}."))
    if run.tp > 1:
        sharded = "torch's parallelize_module shards linear layers, embedding, logits and loss"
        notes.append(Note("tensor-parallel", f"Rank 0 of tp={run.tp}: {sharded}."))
    return (*notes, *_nccl(gpu))


def _deepspeed(run: Training) -> tuple[Note, ...]:
    loaded = "transformers' model was loaded on the host first"
    note = Note("engine", f"Rank 0 of DeepSpeed's engine with ZeRO stage {run.zero}; {loaded}.")
    return (note,) * (run.world_size > 1)


def _megatron(run: Training) -> tuple[Note, ...]:
    return (MEGATRON_NOTE if Megatron.of(run).apex else MEGATRON_ALONE_NOTE,)


OWN = {"deepspeed": _deepspeed, "megatron": _megatron}  # stacks with an engine of their own


def _nccl(gpu: GPU | None) -> tuple[Note, ...]:
    if gpu is None:
        return ()
    if gpu.nccl is None:
        return (NO_NCCL_NOTE,)
    measured = f"`process` includes {show_bytes(gpu.nccl)} for NCCL, as measured on one {gpu.name}"
    return (Note("nccl", f"{measured}; it depends on NCCL's version, channels and groups."),)
