"""Facts about the functions of yours/tp.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Collectives:
    """The collectives of one of `tp` ranks, which are threads and meet at the same `barrier`. `calls` names them."""

    def __init__(self, rank: int, shared: list[Tensor], barrier: Barrier) -> None:
        self.rank, self.tp = rank, len(shared)
        self.shared, self.barrier = shared, barrier
        self.calls: list[str] = []

    def _exchanged(self, name: str, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""
        self.calls.append(name)
        self.shared[self.rank] = x.detach().clone()
        self.barrier.wait()
        shared = list(self.shared)
        self.barrier.wait()  # nobody overwrites before all have read
        return shared

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchanged("all-reduce", x)).sum(0)

    def maximum(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchanged("maximum", x)).amax(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchanged("all-gather", x), dim=1)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        total = torch.stack(self._exchanged("reduce-scatter", x)).sum(0)
        return total.chunk(self.tp, dim=1)[self.rank].clone()


def on_ranks(tp: int, function: Callable[[Any], Any]) -> list[Any]:
    """Return function(collectives) of each of `tp` ranks. They are threads, so nothing has to be launched."""
    barrier, shared = Barrier(tp, timeout=5), [torch.empty(0)] * tp

    def on_rank(rank: int) -> Any:
        try:
            return function(Collectives(rank, shared, barrier))
        except Exception:
            barrier.abort()  # the others would wait for this rank
            raise

    with ThreadPoolExecutor(tp) as threads:
        ranks = [threads.submit(on_rank, rank) for rank in range(tp)]
        errors = [error for rank in ranks if (error := rank.exception())]
        for error in sorted(errors, key=lambda error: type(error).__name__ == "BrokenBarrierError"):
            raise error
        return [rank.result() for rank in ranks]


def alone() -> Collectives:
    """Return the collectives of a single rank."""
    return Collectives(0, [torch.empty(0)], Barrier(1))


# ---- f and g


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _passed(function: Callable[..., Any], sequence_parallel: bool, which: int, tp: int = 2) -> list[Any]:
    """Return the output, the gradient and the collectives of f (0) or g (1) on each rank.

    Rank r has (r + 1) times the same input, and the gradient of its output is r + 1 everywhere.
    """

    def on_rank(collectives: Collectives) -> tuple[Tensor, Tensor, list[str]]:
        x = ((collectives.rank + 1) * _numbers(1, 4, 3)).requires_grad_()
        y = function(collectives, sequence_parallel)[which](x)
        y.backward(torch.full_like(y, collectives.rank + 1.0))
        assert x.grad is not None
        return y.detach(), x.grad, collectives.calls

    return on_ranks(tp, on_rank)


def _f(function: Callable[..., Any]) -> bool:
    return all(
        torch.equal(y, (rank + 1) * _numbers(1, 4, 3)) and calls == ["all-reduce"] and bool((grad == 3).all())
        for rank, (y, grad, calls) in enumerate(_passed(function, False, 0))
    )


def _g(function: Callable[..., Any]) -> bool:
    return all(
        torch.allclose(y, 3 * _numbers(1, 4, 3)) and calls == ["all-reduce"] and bool((grad == rank + 1).all())
        for rank, (y, grad, calls) in enumerate(_passed(function, False, 1))
    )


def _f_sequence(function: Callable[..., Any]) -> bool:
    whole = torch.cat((_numbers(1, 4, 3), 2 * _numbers(1, 4, 3)), dim=1)
    return all(
        torch.equal(y, whole) and calls == ["all-gather", "reduce-scatter"] and bool((grad == 3).all())
        for y, grad, calls in _passed(function, True, 0)
    )


def _g_sequence(function: Callable[..., Any]) -> bool:
    gradient = torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64)[None, :, None].expand(1, 4, 3)
    return all(
        torch.allclose(y, 3 * _numbers(1, 4, 3).chunk(2, dim=1)[rank])
        and calls == ["reduce-scatter", "all-gather"]
        and torch.equal(grad, gradient)
        for rank, (y, grad, calls) in enumerate(_passed(function, True, 1))
    )


conjugates = {
    "f returns x, and sums its gradient": _f,
    "g sums x, and returns its gradient": _g,
    "sequence parallel, f gathers x, and reduces and scatters its gradient": _f_sequence,
    "sequence parallel, g reduces and scatters x, and gathers its gradient": _g_sequence,
    "one rank alone changes nothing": lambda f: all(
        torch.equal(_passed(f, sequence_parallel, which, tp=1)[0][0], _numbers(1, 4, 3))
        for sequence_parallel in (False, True)
        for which in (0, 1)
    ),
}


# ---- shares of linear layers


def _linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)


def _shares(function: Callable[..., Any], linear: nn.Linear, tp: int, split: str, parts: int = 1) -> list[Any]:
    return [function(linear, rank, tp, split, parts) for rank in range(tp)]


def _columns_join(function: Callable[..., Any], tp: int) -> bool:
    x, linear = _numbers(5, 6), _linear(6, 8)
    return torch.allclose(torch.cat([share(x) for share in _shares(function, linear, tp, "columns")], 1), linear(x))


def _rows_sum(function: Callable[..., Any], tp: int, bias: bool = True) -> bool:
    x, linear = _numbers(5, 8), _linear(8, 6, bias)
    shares = zip(x.chunk(tp, dim=1), _shares(function, linear, tp, "rows"), strict=True)
    return torch.allclose(sum((share(piece) for piece, share in shares), torch.zeros(())), linear(x))


def _pair(function: Callable[..., Any], tp: int) -> bool:
    """Whether the shares of a gated MLP, whose gate and up are one matrix, sum to its output."""
    x, first, second = _numbers(5, 6), _linear(6, 16), _linear(8, 6)

    def gated(first: Any, second: Any) -> Tensor:
        gate, up = first(x).chunk(2, dim=-1)
        return second(F.silu(gate) * up)

    shares = zip(_shares(function, first, tp, "columns", 2), _shares(function, second, tp, "rows"), strict=True)
    return torch.allclose(sum((gated(*share) for share in shares), torch.zeros(())), gated(first, second))


def _new(function: Callable[..., Any]) -> bool:
    linear = _linear(4, 4)
    share = function(linear, 1, 2, "columns")
    return isinstance(share, nn.Linear) and share.weight.untyped_storage().nbytes() == linear.weight.nbytes // 2


shard_linear = {
    "the columns of 2 ranks join to the output": lambda f: _columns_join(f, 2),
    "those of 4 ranks, too": lambda f: _columns_join(f, 4),
    "the rows of 4 ranks sum to the output, with one bias": lambda f: _rows_sum(f, 4),
    "rows without a bias": lambda f: _rows_sum(f, 2, bias=False),
    "a pair, whose first matrix has two parts": lambda f: _pair(f, 4),
    "one rank has the whole layer": lambda f: _pair(f, 1),
    "a share stores no more than its elements": _new,
}


# ---- the loss


def _losses(function: Callable[..., Any], tp: int, scale: float = 1.0) -> list[tuple[Tensor, Tensor, list[str]]]:
    """Return the loss, the gradient of this rank's logits and its collectives, on each rank."""
    logits_TV, targets_T = scale * _numbers(6, 12), torch.tensor([0, 3, 11, 5, 6, 8])

    def on_rank(collectives: Collectives) -> tuple[Tensor, Tensor, list[str]]:
        mine = logits_TV.chunk(tp, dim=1)[collectives.rank].clone().requires_grad_()
        loss = function(mine, targets_T, collectives)
        loss.backward()
        assert mine.grad is not None
        return loss.detach(), mine.grad, collectives.calls

    return on_ranks(tp, on_rank)


def _expected(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    logits_TV = (scale * _numbers(6, 12)).requires_grad_()
    loss = F.cross_entropy(logits_TV, torch.tensor([0, 3, 11, 5, 6, 8]))
    return loss.detach(), torch.autograd.grad(loss, logits_TV)[0]


def _loss_agrees(function: Callable[..., Any], tp: int, scale: float = 1.0) -> bool:
    return all(torch.allclose(loss, _expected(scale)[0]) for loss, _, _ in _losses(function, tp, scale))


def _gradient_agrees(function: Callable[..., Any], tp: int) -> bool:
    return torch.allclose(torch.cat([gradient for _, gradient, _ in _losses(function, tp)], 1), _expected()[1])


vocabulary_loss = {
    "the loss is that of all logits, on 1, 2 and 4 ranks": lambda f: all(_loss_agrees(f, tp) for tp in (1, 2, 4)),
    "each rank has the gradient of its logits": lambda f: _gradient_agrees(f, 1) and _gradient_agrees(f, 4),
    "large logits do not overflow": lambda f: _loss_agrees(f, 2, 1000.0),
    "no logits are gathered": lambda f: all("all-gather" not in calls for _, _, calls in _losses(f, 2)),
}
