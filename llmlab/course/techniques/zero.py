"""ZeRO from scratch (Rajbhandari et al., arXiv 1910.02054, section 5): ranks divide the tensors that DDP replicates.

    python -m llmlab.course.experiments zero --ranks 2 --stage 3 --steps 20 --engine scratch --json

    stage   a rank stores 1/dp of   it sends in each step, in units of (dp - 1) / dp of the parameters' bytes
    1       optimizer states        2: reduce-scatter of the gradients, all-gather of the updated parameters
    2       and gradients           2: the same, but each unit is reduced during the backward pass
    3       and parameters          3: two all-gathers of the parameters, one for each pass, and the reduce-scatter

The parameters of a unit, usually a transformer block, lie in one flat tensor. It is padded so that its dp chunks are
equally long.

    dp  ranks     P  elements of the flat tensor of a unit, a multiple of dp
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import SpecError
from .data_parallel import flat_gradients, ring_all_gather, ring_reduce_scatter, same_model
from .memory_anatomy import storage_bytes

STAGES = (1, 2, 3)


class Unit:
    """Parameters in one flat tensor, (P,), of which rank r updates chunk r, (P / dp,)."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        ranks, rank = dist.get_world_size(), dist.get_rank()
        used = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(-(-used // ranks) * ranks, dtype=parameters[0].dtype)  # (P,)
        views = self.flat[:used].split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            view.copy_(parameter.detach().flatten())
            parameter.data = view.view_as(parameter)
        self.bytes = self.flat.nbytes
        self.own = self.flat.tensor_split(ranks)[rank]  # (P / dp,)
        self.chunk = nn.Parameter(self.own)  # a view, so the optimizer updates the flat tensor
        self.waiting = len(parameters)  # gradients that the backward pass has not computed yet

    def separate(self) -> None:
        """Copy this rank's chunk into its own memory, and free the flat tensor."""
        self.chunk = nn.Parameter(self.own.detach().clone())
        self.free()

    def gather(self) -> int:
        """All-gather the flat tensor, unless it is in memory already; return the bytes sent."""
        storage = self.flat.untyped_storage()
        if storage.size():
            return 0
        storage.resize_(self.bytes)  # the same storage, to which the tensors that autograd saved refer
        self.own.copy_(self.chunk.detach())
        return ring_all_gather(self.flat)

    def free(self) -> None:
        """Free the memory of the flat tensor; its storage remains, with a size of 0."""
        self.flat.untyped_storage().resize_(0)

    def reduce_gradients(self) -> int:
        """Average the gradients over ranks, store this rank's chunk, and free the others; return the bytes sent."""
        flat = torch.zeros(self.bytes // self.chunk.element_size(), dtype=self.chunk.dtype)  # (P,)
        flat[: sum(p.numel() for p in self.parameters)] = flat_gradients(self.parameters)
        for parameter in self.parameters:
            parameter.grad = None
        sent = ring_reduce_scatter(flat.mul_(1 / dist.get_world_size()))
        chunk = flat.tensor_split(dist.get_world_size())[dist.get_rank()].clone()  # (P / dp,)
        self.chunk.grad = chunk if self.chunk.grad is None else self.chunk.grad + chunk
        return sent


class Zero:
    """ZeRO for a model: call `backward(loss)`, then `step()`.

    Each of `modules` becomes a unit, and all other parameters form one more. In stage 3, a unit is whole only while it
    computes, so modules should be large and run one after another, as transformer blocks do. The optimizer sees flat
    chunks, so its update must be elementwise, as that of AdamW is. `sent` counts bytes.
    """

    def __init__(
        self, model: nn.Module, modules: list[nn.Module], stage: int, optimizer: type[torch.optim.Optimizer], **options
    ) -> None:
        if stage not in STAGES:
            raise SpecError(f"stage={stage!r} is not one of {', '.join(map(str, STAGES))}; 0 is data parallelism")
        same_model(model)
        self.model, self.stage, self.sent = model, stage, 0
        owned = [list(module.parameters()) for module in modules]
        in_modules = {p for parameters in owned for p in parameters}
        self.units = [Unit(parameters) for parameters in owned]
        self.units.append(Unit([p for p in model.parameters() if p not in in_modules]))
        for module, unit in zip([*modules, model], self.units, strict=True):
            if stage >= 2:
                for parameter in unit.parameters:
                    parameter.register_post_accumulate_grad_hook(lambda _, unit=unit: self._arrived(unit))
            if stage == 3:
                unit.separate()
                module.register_forward_pre_hook(lambda *_, unit=unit: self._gather(unit))
                module.register_forward_hook(lambda *_, unit=unit: unit.free())
                module.register_full_backward_pre_hook(lambda *_, unit=unit: self._gather(unit))
        self.optimizer = optimizer([unit.chunk for unit in self.units], **options)

    def _gather(self, unit: Unit) -> None:
        self.sent += unit.gather()

    def _arrived(self, unit: Unit) -> None:
        unit.waiting -= 1
        if unit.waiting == 0:  # this was the last gradient of the unit
            unit.waiting = len(unit.parameters)
            self.sent += unit.reduce_gradients()
            if self.stage == 3:
                unit.free()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """Update this rank's chunks; in stages 1 and 2, all-gather the new parameters."""
        for unit in self.units:
            if self.stage == 1:  # all gradients are still whole
                self.sent += unit.reduce_gradients()
            elif unit.chunk.grad is None or unit.waiting < len(unit.parameters):  # not reduced
                flat_gradients(unit.parameters)  # raises an error that names the missing gradients
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.stage < 3:
            self.sent += sum(ring_all_gather(unit.flat) for unit in self.units)

    def parameter_bytes(self) -> int:
        """Return the bytes of parameters on this rank now, in whole units and in chunks."""
        return storage_bytes(tensor for unit in self.units for tensor in (unit.flat, unit.chunk))

    def gradient_bytes(self) -> int:
        """Return the bytes of gradients on this rank now."""
        return storage_bytes(p.grad for p in [*self.model.parameters(), *(unit.chunk for unit in self.units)])
