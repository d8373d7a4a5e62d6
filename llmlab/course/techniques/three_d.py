"""3D parallelism from scratch: each rank has a part of the matrices of some layers, and processes some sequences.

The ranks form a mesh, pp × dp × tp, in which tp changes fastest (Megatron-LM, arXiv 2104.04473, section 3). Each kind
of parallelism has its own groups of ranks:

    tensor_parallel.shard   splits matrices over the ranks of a tp group
    pipeline.run            passes micro-batches along the ranks of a pp group
    an all-reduce           averages gradients over the ranks of a dp group, once, after the last micro-batch

    B  sequences of a step, over all ranks     S  tokens per sequence
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..architectures.llama import Llama
from . import pipeline, pipeline_schedules, tensor_parallel


class Share:
    """The part of a Llama on one rank of a mesh. `place` are the coordinates of the rank: pp, dp, tp.

    `stage` is a module with the parameters of this rank. An optimizer updates it like a whole model.
    """

    def __init__(self, whole: Llama, mesh: DeviceMesh, schedule: str, micro_batches: int) -> None:
        place = mesh.get_coordinate()
        assert place is not None  # all ranks are in the mesh
        self.place = stage, self.replica, _ = place
        self.replicas = mesh.size(1)
        self.tp_group, self.dp_group = mesh.get_group("tp"), mesh.get_group("dp")
        self.pp_ranks = dist.get_process_group_ranks(mesh.get_group("pp"))  # of the stages, in their order
        self.stage = pipeline.Stage(tensor_parallel.shard(whole, group=self.tp_group), stage, mesh.size(0))
        self.plan = pipeline_schedules.schedule(schedule, mesh.size(0), micro_batches, 1)
        self.micro_batches, self.hidden = micro_batches, whole.spec.hidden

    def forward_backward(self, ids_BS: Tensor) -> float | None:
        """Compute the gradients of the mean loss of the batch. Return this loss in nats per token on the ranks of the
        last stage, and None on all others."""
        each = len(ids_BS) // self.replicas
        mine_BS = ids_BS[self.replica * each :][:each]
        shape = (each // self.micro_batches, ids_BS.shape[1], self.hidden)

        def loss(logits: Tensor, ids: Tensor) -> Tensor:
            return tensor_parallel.next_token_loss(logits, ids, self.tp_group)

        micro_batches = list(mine_BS.chunk(self.micro_batches))
        own = pipeline.run(self.plan, {self.place[0]: self.stage}, micro_batches, loss, shape, ranks=self.pp_ranks)
        for gradient in [p.grad for p in self.stage.parameters() if p.grad is not None]:
            dist.all_reduce(gradient, group=self.dp_group)
            gradient.div_(self.replicas)  # all ranks have equally many tokens
        mean = torch.tensor(0.0 if own is None else own / self.replicas)
        dist.all_reduce(mean, group=self.dp_group)
        return None if own is None else mean.item()
