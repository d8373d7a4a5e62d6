"""Three-dimensional parallelism from scratch: each rank has a share of some layers, and sees some of the sequences.

The ranks form a mesh, pp × dp × tp, where tp changes fastest (Megatron-LM, arXiv 2104.04473, section 3). The three
techniques are those of their chapters, each on its own group of ranks:

    tensor_parallel.shard   splits matrices over the ranks of `tp`
    pipeline.run            passes micro-batches along the ranks of `pp`
    an all-reduce           averages gradients over the ranks of `dp`, once, after the last micro-batch

    B  sequences of a step, over all ranks     T  seq_len
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..architectures.llama import Llama
from . import pipeline, pipeline_schedules, tensor_parallel


class Share:
    """The share of a Llama on one rank of a mesh, and the rank's part of a step. `place`: the rank's (pp, dp, tp).

    `stage` is the module: an optimizer updates its parameters as if it were a whole model.
    """

    def __init__(self, whole: Llama, mesh: DeviceMesh, schedule: str, micro_batches: int) -> None:
        place = mesh.get_coordinate()
        assert place is not None  # all ranks are in the mesh
        self.place = stage, self.replica, _ = place
        self.replicas = mesh.size(1)
        self.tp_group, self.dp_group = mesh.get_group("tp"), mesh.get_group("dp")
        self.pp_ranks = dist.get_process_group_ranks(mesh.get_group("pp"))  # this rank's pipeline, first stage first
        self.stage = pipeline.Stage(tensor_parallel.shard(whole, group=self.tp_group), stage, mesh.size(0))
        self.plan = pipeline_schedules.schedule(schedule, mesh.size(0), micro_batches, 1)
        self.micro_batches, self.hidden = micro_batches, whole.spec.hidden

    def forward_backward(self, ids_BT: Tensor) -> float | None:
        """Compute the gradients of the whole batch's mean loss in `stage`; return that loss, in nats per token, or None
        on ranks of other stages than the last."""
        share = len(ids_BT) // self.replicas
        mine_BT = ids_BT[self.replica * share :][:share]
        shape = (share // self.micro_batches, ids_BT.shape[1], self.hidden)

        def loss(logits: Tensor, ids: Tensor) -> Tensor:
            return tensor_parallel.next_token_loss(logits, ids, self.tp_group)

        micro_batches = list(mine_BT.chunk(self.micro_batches))
        own = pipeline.run(self.plan, {self.place[0]: self.stage}, micro_batches, loss, shape, ranks=self.pp_ranks)
        for gradient in [p.grad for p in self.stage.parameters() if p.grad is not None]:
            dist.all_reduce(gradient, group=self.dp_group)
            gradient.div_(self.replicas)  # shares are equal, so the mean of means is the mean
        mean = torch.tensor(0.0 if own is None else own / self.replicas)
        dist.all_reduce(mean, group=self.dp_group)
        return None if own is None else mean.item()
