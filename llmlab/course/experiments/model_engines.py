"""A Llama that is divided over ranks by tensors, by layers or on a mesh, from scratch or by torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ...base.errors import SpecError
from ..architectures.llama import Llama
from ..techniques import pipeline, tensor_parallel
from ..techniques.pipeline_schedules import schedule
from ..techniques.tensor_parallel import COLUMNS, ROWS
from ..techniques.three_d import Share
from ..techniques.training_loop import next_token_loss
from .engines import Engine, by_adamw
from .job import Job, tiny_llama

ENGINES = ("scratch", "torch")


def check(job: Job) -> None:
    """Raise SpecError if the job's degrees do not divide the model."""
    run, spec, stages = job.run, tiny_llama(), job.run.pp * job.virtual_stages
    if job.engine not in ENGINES:
        raise SpecError(f"engine={job.engine!r} is not one of {', '.join(ENGINES)}")
    schedule(job.schedule, run.pp, run.accumulation, job.virtual_stages)
    try:
        tensor_parallel.check(spec, run.tp, run.seq_len if run.sequence_parallel else None)
        pipeline.check(spec, stages)
    except SpecError as error:
        degrees = f"dp={run.dp} × tp={run.tp} × pp={run.pp}"
        virtual = f", virtual_stages={job.virtual_stages}" if job.virtual_stages > 1 else ""
        raise SpecError(f"{error} ({degrees}{virtual})") from None


def share(job: Job) -> Engine:
    """Return the job's engine for this rank's share of a Llama, whose weights follow from torch's seed."""
    whole, run = Llama(tiny_llama()), job.run
    if job.experiment == "three_d":
        mesh = init_device_mesh("cpu", (run.pp, run.dp, run.tp), mesh_dim_names=("pp", "dp", "tp"))
        mine = Share(whole, mesh, job.schedule, run.accumulation)
        return by_adamw(mine.stage.parameters(), mine.forward_backward, place=mine.place)
    if job.experiment == "pipeline":
        return stages(whole, job)
    return parallelized(whole, run.sequence_parallel) if job.engine == "torch" else shard(whole, run.sequence_parallel)


def shard(whole: Llama, sequence_parallel: bool) -> Engine:
    """Return tensor parallelism as in techniques/tensor_parallel.py."""
    mine = tensor_parallel.shard(whole, sequence_parallel)

    def forward_backward(ids_BT: Tensor) -> float:
        loss = tensor_parallel.next_token_loss(mine(ids_BT), ids_BT)
        loss.backward()
        if sequence_parallel:
            tensor_parallel.sum_norm_gradients(mine)
        return loss.item()

    return by_adamw(mine.parameters(), forward_backward)


def parallelized(whole: Llama, sequence_parallel: bool) -> Engine:
    """Return tensor parallelism by torch.distributed.tensor.parallel, whose parameters are DTensors."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    outside = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "lm_head": ColwiseParallel(input_layouts=outside, output_layouts=Replicate()),
    }
    for name, _ in whole.named_modules():
        last = name.rpartition(".")[2]
        if last in COLUMNS:
            plan[name] = ColwiseParallel()
        elif last in ROWS:
            plan[name] = RowwiseParallel(output_layouts=outside)
        elif last in ("self_attn", "mlp"):
            same = (None, None, None) if last == "self_attn" else ()  # the angles, mask and cache do not change
            plan[name] = PrepareModuleInput(input_layouts=(outside, *same), desired_input_layouts=(Replicate(), *same))
        elif last.endswith("norm") and sequence_parallel:
            plan[name] = SequenceParallel()
    mine = parallelize_module(whole, init_device_mesh("cpu", (dist.get_world_size(),)), plan)

    def forward_backward(ids_BT: Tensor) -> float:
        loss = next_token_loss(mine(ids_BT), ids_BT)
        loss.backward()
        return loss.item()

    return by_adamw(mine.parameters(), forward_backward)


def stages(whole: Llama, job: Job) -> Engine:
    """Return this rank's stages of a pipeline, by techniques/pipeline.py or by torch.distributed.pipelining."""
    run, count = job.run, job.run.pp * job.virtual_stages
    mine = {number: pipeline.Stage(whole, number, count) for number in range(dist.get_rank(), count, run.pp)}
    parameters = [p for stage in mine.values() for p in stage.parameters()]
    if job.engine == "torch":
        return by_adamw(parameters, pipelined(mine, count, job.schedule, run.accumulation))
    plan = schedule(job.schedule, run.pp, run.accumulation, job.virtual_stages)
    shape = (run.micro_batch, run.seq_len, whole.spec.hidden)

    def forward_backward(ids_BT: Tensor) -> float | None:
        return pipeline.run(plan, mine, list(ids_BT.chunk(run.accumulation)), next_token_loss, shape)

    return by_adamw(parameters, forward_backward)


def pipelined(
    mine: Mapping[int, nn.Module], stages: int, schedule: str, micro_batches: int
) -> Callable[[Tensor], float | None]:
    """Return a function that runs this rank's stages by the `schedule` of torch.distributed.pipelining."""
    from torch.distributed import pipelining

    kinds = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
    wrapped = [pipelining.PipelineStage(stage, number, stages, torch.device("cpu")) for number, stage in mine.items()]
    own_stages = wrapped if schedule in ("interleaved", "zero-bubble") else wrapped[0]
    plan = kinds[schedule](own_stages, micro_batches, loss_fn=next_token_loss)

    def forward_backward(ids_BT: Tensor) -> float | None:
        losses: list[Tensor] = []
        first, last = 0 in mine, stages - 1 in mine
        plan.step(*([ids_BT] if first else []), target=ids_BT if last else None, losses=losses if last else None)
        return sum(loss.item() for loss in losses) / micro_batches if last else None

    return forward_backward
