"""Notes of a report on a run over several ranks: which of PyTorch's engines it is, and what is not in the figures."""

from __future__ import annotations

from ...base.units import show_bytes
from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.run import Run, Training
from ...specs.stacks import DeepSpeed, Megatron
from ...step.ranks import is_sharded

NOTES = {
    0: "Rank 0 of DistributedDataParallel, with torch's defaults: gradients, and buckets of as many bytes.",
    1: "Rank 0 of DistributedDataParallel with ZeroRedundancyOptimizer, torch's ZeRO-1.",
    2: "Rank 0 of FSDP2 with reshard_after_forward=False: blocks stay whole from forward to backward.",
    3: "Rank 0 of FSDP2 (fully_shard), a block a unit, the rest of the model another.",
}
DEEPSPEED_NOTE = "Rank 0 of DeepSpeed's engine, ZeRO stage {}; transformers' model was on the host before."
MEGATRON_NOTE = "megatron-core's own layers; in the place of Apex's kernels there is what they allocate."
MEGATRON_ALONE_NOTE = "megatron-core's own layers, and PyTorch's norm, softmax and AdamW, as without Apex."
POLICY_NOTE = (
    "{} is FSDP2's MixedPrecisionPolicy: fp32 shards, gathered in half precision, reduced in {}; the optimizer steps "
    "as torch chooses, by foreach."
)
EXPERTS_NOTE = (
    "FSDP2 cuts a layer's {0} experts along the first dimension, by default: of {1} ranks, {0} hold one each, the rest "
    "none, and it is gathered with padding. A shard_placement_fn that cuts another dimension divides them by {1}."
)
COPIES_NOTE = "HSDP: {} ranks share each of {} copies; FSDP2 sums a shard's gradients over them by an all-reduce."
STAGED_NOTE = "Rank 0 of pp={}: torchtitan's split, and the schedule of torch.distributed.pipelining with its buffers."
EACH_NOTE = "FSDP2 reduces gradients after each of the {} micro-batches."
LAST_NOTE = "FSDP2 reduces gradients after the last of the {} micro-batches; until then each rank sums whole ones."
NO_NCCL_NOTE = "What NCCL takes outside of PyTorch's allocator is not in it, so `process` is not known."
NCCL_NOTE = "`process` has {} for NCCL, read on one {}: it depends on NCCL's version, channels and groups."


def notes(spec: ModelSpec, run: Run, card: GPU | None) -> tuple[str, ...]:
    """Return what a report says of a run on several ranks of `card`; None is the CPU, which has no NCCL."""
    if not isinstance(run, Training):
        return ()
    if isinstance(run.stack, Megatron):
        own = MEGATRON_NOTE if run.stack.apex else MEGATRON_ALONE_NOTE
        return (own, *(_nccl(card) if run.world_size > 1 else ()))
    if run.world_size == 1:
        return ()
    if isinstance(run.stack, DeepSpeed):
        return (DEEPSPEED_NOTE.format(run.zero), *_nccl(card))
    engine: tuple[str, ...] = (NOTES[run.zero],) if run.dp > 1 else ()
    if run.dp_replicate > 1:
        engine += (COPIES_NOTE.format(run.dp_shard, run.dp_replicate),)
    if is_sharded(run) and run.precision.startswith("mixed"):
        engine += (POLICY_NOTE.format(run.precision, run.reduce_dtype),)
    if is_sharded(run) and 0 < spec.experts < run.dp_shard:
        engine += (EXPERTS_NOTE.format(spec.experts, run.dp_shard),)
    if is_sharded(run) and run.accumulation > 1 and run.pp == 1:
        engine += ((EACH_NOTE if run.sync_each_batch else LAST_NOTE).format(run.accumulation),)
    split = "parallelize_module cuts linears, embedding, logits and loss"
    tensor = (f"Rank 0 of tp={run.tp}: torch's {split}.",) if run.tp > 1 else ()
    staged = (STAGED_NOTE.format(run.pp),) if run.pp > 1 else ()
    return (*staged, *engine, *tensor, *_nccl(card))


def _nccl(card: GPU | None) -> tuple[str, ...]:
    if card is None:
        return ()
    return (NO_NCCL_NOTE if card.nccl is None else NCCL_NOTE.format(show_bytes(card.nccl), card.name),)
