"""Activation checkpointing from scratch: keep a block's input, and run the block again when backward needs the rest.

Chen et al., arXiv 1604.06174. Three ways: an autograd.Function (`Recompute`), hooks on what autograd saves
(`checkpoint`, as in PyTorch's use_reentrant=False), and the hooks with chosen operators' results kept (selective).
`every` runs the blocks of a model in segments.

    L  layers     k  layers of a segment     a  bytes of a layer's input     A  bytes that a layer keeps for backward
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..base.errors import SpecError

# What "selective" keeps: matrix products and attention, the operators that cost time. The rest is recomputed.
KEPT_OPERATORS = (
    "mm", "addmm", "linear", "_grouped_mm",  # not bmm: eager attention's scores are what one wants to be rid of
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


class Conditions:
    """What a result depends on besides the arguments, as it is now: the random generators and autocast."""

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
        """Run the block under the old conditions, and leave the generators as they were before it."""
        devices = [] if self.device_rng is None else [self.device]
        with torch.random.fork_rng(devices), torch.autocast(self.device.type, **self.autocast):
            torch.set_rng_state(self.rng)  # or dropout would draw another mask
            if self.device_rng is not None:
                torch.cuda.set_rng_state(self.device_rng, self.device)
            yield


class Recompute(torch.autograd.Function):
    """function(x), of which nothing but x is kept; `parameters` are inputs too, so that they get gradients."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.conditions = function, Conditions(x.device)
        ctx.save_for_backward(x, *parameters)  # the parameters are there anyway; x is what this costs
        return function(x)  # autograd is off inside a Function: no operator saves anything

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[1])  # detached: this graph ends here
        with torch.enable_grad(), ctx.conditions.again():
            y = ctx.function(x)  # the block, once more, and this time autograd saves
        needed = [t for t in (x, *parameters) if t.requires_grad]
        found = iter(torch.autograd.grad(y, needed, gradient, allow_unused=True))
        return None, *(next(found) if t.requires_grad else None for t in (x, *parameters))


def recompute(module: nn.Module, x: Tensor, *rest: Any) -> Tensor:
    """Return module(x, *rest), a Tensor, and keep x alone. `rest` gets no gradient: SpecError where it wants one."""
    if any(isinstance(one, Tensor) and one.requires_grad for one in rest):
        raise SpecError("recompute(module, x, *rest) differentiates x and the parameters; use checkpoint(module, ...)")
    return Recompute.apply(lambda x: module(x, *rest), x, *module.parameters())


def checkpoint(function: Callable[..., Any], *inputs: Any, keep: Collection[str] = ()) -> Any:
    """Return function(*inputs). What autograd saves inside is dropped, and made again when backward first asks for it.

    `keep`: names of aten operators whose results are kept instead of computed again, such as `KEPT_OPERATORS`.
    The function must compute the same again; one that changes its inputs in place does not.
    """
    devices = [one.device for one in inputs if isinstance(one, Tensor)]
    conditions = Conditions(devices[0] if devices else torch.device("cpu"))
    results: list[Any] = []  # of the operators to keep, in their order
    remade: dict[int, Tensor] = {}  # what autograd saved, by its number
    count = 0

    def drop(tensor: Tensor) -> int:
        nonlocal count
        count += 1
        return count - 1  # autograd keeps a number in place of the tensor

    def remake(number: int) -> Tensor:
        if number not in remade:
            remade.clear()
            saved = iter(range(count))

            def take(tensor: Tensor) -> None:
                remade[next(saved)] = tensor.detach()  # the second graph itself keeps nothing

            replayed = Replay(keep, results) if keep else nullcontext()
            hooks = torch.autograd.graph.saved_tensors_hooks(take, lambda nothing: nothing)
            with torch.enable_grad(), conditions.again(), replayed, hooks:
                function(*inputs)
        return remade.pop(number)  # backward asks once for each

    with torch.autograd.graph.saved_tensors_hooks(drop, remake), Keep(keep, results) if keep else nullcontext():
        return function(*inputs)


class Keep(TorchDispatchMode):
    """Appends the results of the named aten operators to `results`."""

    def __init__(self, names: Collection[str], results: list[Any]) -> None:
        super().__init__()
        self.names, self.results = set(names), results

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.names:
            self.results.append(tree_map_only(Tensor, Tensor.detach, result))
        return result


class Replay(Keep):
    """Gives the named operators' old results, in their order, instead of computing; each is free after its use."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.names and self.results:
            return self.results.pop(0)
        return func(*args, **(kwargs or {}))  # a graph walked a second time finds no results: it computes them


def selective(function: Callable[..., Any], *inputs: Any) -> Any:
    """Return function(*inputs); matrix products and attention keep their results, the rest is computed again."""
    return checkpoint(function, *inputs, keep=KEPT_OPERATORS)


class Segment(nn.ModuleList):
    """Blocks one after the other; `rest` is what each takes besides x."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        for block in self:
            x = block(x, *rest)
        return x


def every(k: int, how: Callable[..., Tensor] = checkpoint) -> Callable[..., Tensor]:
    """Return what runs blocks in segments of `k` and keeps each segment's input: GPT's and Llama's `run_blocks`.

    `how` runs one segment: `checkpoint`, `recompute`, `selective`, torch.utils.checkpoint's. SpecError for k < 1.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise SpecError(f"k={k!r} is not a whole number >= 1: give the layers of a segment")

    def run(blocks: Iterable[nn.Module], x: Tensor, *rest: Any) -> Tensor:
        blocks = list(blocks)
        for start in range(0, len(blocks), k):
            x = how(Segment(blocks[start : start + k]), x, *rest)
        return x

    return run


def peak_bytes(layers: int, k: int, input_bytes: int, kept_bytes: int) -> int:
    """Return ⌈L / k⌉ · a + k · A: every segment's input, and one segment whole (arXiv 1604.06174, section 4.1)."""
    return math.ceil(layers / k) * input_bytes + min(k, layers) * kept_bytes


def best_spacing(layers: int, input_bytes: int, kept_bytes: int) -> float:
    """Return the k at which L / k · a + k · A is smallest: √(L · a / A), which is √L only where a layer keeps no more
    than its input."""
    return math.sqrt(layers * input_bytes / kept_bytes)
