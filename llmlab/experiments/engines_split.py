"""The same cuts by torch: parallelize_module for tensors, torch.distributed.pipelining for layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..architectures.llama import Llama
from ..techniques.tensor_parallel import COLUMNS, ROWS
from ..techniques.training_loop import next_token_loss


def with_parallelize_module(
    whole: Llama, sequence_parallel: bool
) -> tuple[list[nn.Parameter], Callable[[Tensor], float]]:
    """Cut `whole` by torch.distributed.tensor.parallel; return its parameters, DTensors, and forward with backward."""
    from torch.distributed.device_mesh import init_device_mesh
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
        elif last in ("self_attn", "mlp"):  # attention is also given angles, mask and cache, which stay as they are
            rest = (None, None, None) if last == "self_attn" else ()
            plan[name] = PrepareModuleInput(input_layouts=(outside, *rest), desired_input_layouts=(Replicate(), *rest))
        elif last.endswith("norm") and sequence_parallel:
            plan[name] = SequenceParallel()
    shard = parallelize_module(whole, init_device_mesh("cpu", (dist.get_world_size(),)), plan)

    def forward_backward(ids_BT: Tensor) -> float:
        loss = next_token_loss(shard(ids_BT), ids_BT)
        loss.backward()
        return loss.item()

    return list(shard.parameters()), forward_backward


def with_pipelining(
    mine: Mapping[int, nn.Module], stages: int, schedule: str, micro_batches: int
) -> Callable[[Tensor], float | None]:
    """Return forward with backward of this rank's stages, by torch.distributed.pipelining's schedule of that name."""
    from torch.distributed import pipelining

    kinds = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
    wrapped = [pipelining.PipelineStage(stage, number, stages, torch.device("cpu")) for number, stage in mine.items()]
    given = wrapped if schedule in ("interleaved", "zero-bubble") else wrapped[0]
    plan = kinds[schedule](given, micro_batches, loss_fn=next_token_loss)

    def forward_backward(ids_BT: Tensor) -> float | None:
        losses: list[Tensor] = []
        first, last = 0 in mine, stages - 1 in mine
        plan.step(*([ids_BT] if first else []), target=ids_BT if last else None, losses=losses if last else None)
        return sum(loss.item() for loss in losses) / micro_batches if last else None

    return forward_backward
