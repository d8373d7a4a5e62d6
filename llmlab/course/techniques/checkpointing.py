"""Activation checkpointing from scratch: save only a block's input, and run the block again in the backward pass.

Chen et al., arXiv 1604.06174. Three implementations: an autograd.Function (`Recompute`), hooks on the tensors that
autograd saves (`checkpoint`, like PyTorch's use_reentrant=False), and the same hooks with the outputs of chosen
operators kept (`selective`). `every` applies one of them to segments of a model's blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...base.compat import TorchDispatchMode, tree_map_only
from ...base.errors import SpecError, check_counts
from ..architectures.gpt import in_order

# "selective" keeps the outputs of matmuls and attention, which take most of the time, and recomputes the rest.
KEPT_OPERATORS = (
    "mm", "addmm", "linear", "_grouped_mm",  # not bmm: its outputs, eager attention's T² scores, should be dropped
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


class Conditions:
    """The state that a function's result depends on, in addition to its arguments: random generators and autocast."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rng = torch.get_rng_state()
        self.device_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kind = device.type
        enabled, cached = torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
        self.autocast: dict[str, Any] = {
            "enabled": enabled, "dtype": torch.get_autocast_dtype(kind), "cache_enabled": cached
        }  # fmt: skip

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the `with` block in the recorded state, and then restore the generators."""
        devices = [] if self.device_rng is None else [self.device]
        with torch.random.fork_rng(devices), torch.autocast(self.device.type, **self.autocast):
            torch.set_rng_state(self.rng)  # otherwise dropout would draw another mask
            if self.device_rng is not None:
                torch.cuda.set_rng_state(self.device_rng, self.device)
            yield


class Recompute(torch.autograd.Function):
    """function(x), which saves only x for backward. `parameters` are inputs too, so that they get gradients."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.conditions = function, Conditions(x.device)
        ctx.save_for_backward(x, *parameters)  # the parameters are in memory anyway: x is the only cost
        return function(x)  # autograd is off inside a Function: no operator saves anything

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[1])  # detached: the new graph starts at x
        with torch.enable_grad(), ctx.conditions.again():
            y = ctx.function(x)  # the block again, and this time autograd saves its tensors
        trained = [t for t in (x, *parameters) if t.requires_grad]
        gradients = iter(torch.autograd.grad(y, trained, gradient, allow_unused=True))
        return None, *(next(gradients) if t.requires_grad else None for t in (x, *parameters))


def recompute(module: nn.Module, x: Tensor, *arguments: Any) -> Tensor:
    """Return module(x, *arguments), a tensor, and save only x. SpecError if an argument requires a gradient."""
    if any(isinstance(argument, Tensor) and argument.requires_grad for argument in arguments):
        raise SpecError("recompute(module, x, *...) differentiates x and the parameters; use checkpoint(module, ...)")
    return Recompute.apply(lambda x: module(x, *arguments), x, *module.parameters())


def checkpoint(function: Callable[..., Any], *inputs: Any, keep: Collection[str] = ()) -> Any:
    """Return function(*inputs). The tensors that autograd saves are dropped, and recomputed in the backward pass.

    `keep`: names of aten operators whose outputs are kept rather than recomputed, such as `KEPT_OPERATORS`.
    The function must give the same result when it runs again, so it must not change its inputs in place.
    """
    devices = [one.device for one in inputs if isinstance(one, Tensor)]
    conditions = Conditions(devices[0] if devices else torch.device("cpu"))
    results: list[Any] = []  # outputs of the operators in `keep`, in the order of their calls
    recomputed: dict[int, Tensor] = {}  # saved tensors, by the number that stands for each
    count = 0

    def drop(tensor: Tensor) -> int:
        nonlocal count
        count += 1
        return count - 1  # autograd keeps a number in place of the tensor

    def restore(number: int) -> Tensor:
        if number not in recomputed:
            recomputed.clear()
            numbers = iter(range(count))

            def collect(tensor: Tensor) -> None:
                recomputed[next(numbers)] = tensor.detach()  # the second graph itself saves nothing

            replayed = Replay(keep, results) if keep else nullcontext()
            hooks = torch.autograd.graph.saved_tensors_hooks(collect, lambda nothing: nothing)
            with torch.enable_grad(), conditions.again(), replayed, hooks:
                function(*inputs)
        return recomputed.pop(number)  # backward asks for each tensor once

    with torch.autograd.graph.saved_tensors_hooks(drop, restore), Keep(keep, results) if keep else nullcontext():
        return function(*inputs)


class Keep(TorchDispatchMode):
    """Dispatch mode that appends the outputs of the named aten operators to `results`."""

    def __init__(self, names: Collection[str], results: list[Any]) -> None:
        super().__init__()
        self.names, self.results = set(names), results

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.names:
            self.results.append(tree_map_only(Tensor, Tensor.detach, result))
        return result


class Replay(Keep):
    """Dispatch mode that returns the stored outputs of the named operators, in order, and frees each after its use."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.names and self.results:
            return self.results.pop(0)
        return func(*args, **(kwargs or {}))  # also in a second backward, which finds no kept outputs


def selective(function: Callable[..., Any], *inputs: Any) -> Any:
    """Return function(*inputs). The outputs of matmuls and attention are kept, and all others are recomputed."""
    return checkpoint(function, *inputs, keep=KEPT_OPERATORS)


class Segment(nn.ModuleList):
    """Blocks in sequence; `arguments` are further arguments of every block."""

    def forward(self, x: Tensor, *arguments: Any) -> Tensor:
        return in_order(self, x, *arguments)


def every(spacing: int, how: Callable[..., Tensor] = checkpoint) -> Callable[..., Tensor]:
    """Return a `run_blocks` for GPT and Llama that checkpoints segments of `spacing` blocks.

    `how` runs one segment: `checkpoint`, `recompute`, `selective` or the function of torch.utils.checkpoint. A spacing
    below 1 raises SpecError.
    """
    check_counts(spacing=spacing)

    def run(blocks: Iterable[nn.Module], x: Tensor, *arguments: Any) -> Tensor:
        blocks = list(blocks)
        for start in range(0, len(blocks), spacing):
            x = how(Segment(blocks[start : start + spacing]), x, *arguments)
        return x

    return run


def peak_bytes(layers: int, spacing: int, input_bytes: int, kept_bytes: int) -> int:
    """Return the bytes of all segments' inputs and of one recomputed segment (arXiv 1604.06174, section 4.1).

    A layer's input has `input_bytes`; without checkpointing the layer keeps `kept_bytes` for the backward pass.
    """
    return math.ceil(layers / spacing) * input_bytes + min(spacing, layers) * kept_bytes


def best_spacing(layers: int, input_bytes: int, kept_bytes: int) -> float:
    """Return the spacing with the lowest peak, √(layers · input_bytes / kept_bytes), as a real number."""
    return math.sqrt(layers * input_bytes / kept_bytes)
