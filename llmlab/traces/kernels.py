"""The operators of a step as a GPU sees them, with numbers or with polynomials in the step's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .polynomials import Polynomial, value_of


class Kernel(NamedTuple):
    """One operator. Its `kind`, on which its time depends, is "matmul", "attention", "attention backward", "gather",
    "strided", "serial", "memory", "sent" (a collective, timed in formulas/time/distributed.py) or "none" (a view).

    `shape` is (batch, M, N, K) of a matmul, (batch · heads, T, S, head size, causal) of attention, else (elements of
    the largest tensor,), and of an operator on lists also the elements of all tensors. `launches` is the number of
    kernels it starts, `backward` says whether autograd's engine calls it, and `phase` is the step's phase in which it
    runs. It moves `again` more bytes if rows of `row` bytes do not fit in the cache. `compiled`: a graph from
    torch.compile launches it, instead of Python operator by operator.
    """

    name: str
    kind: str
    dtype: str
    flops: int
    bytes: int
    shape: tuple[int, ...]
    launches: int
    backward: bool
    phase: str
    again: int = 0
    row: int = 0
    compiled: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that depend on the sizes of a step."""
        return self.flops, self.bytes, self.launches, self.again, self.row, *self.shape

    def with_numbers(self, flops: int, size: int, launches: int, again: int, row: int, *shape: int) -> Kernel:
        """Return this operator with other `numbers`."""
        return self._replace(flops=flops, bytes=size, launches=launches, again=again, row=row, shape=shape)


class KernelFormula(NamedTuple):
    """An operator whose numbers are polynomials, in the order of `Kernel.numbers`; those of `kernel` are ignored."""

    kernel: Kernel
    polynomials: tuple[Polynomial, ...]

    def at(self, batch: int, tokens: int) -> Kernel:
        """Return the operator of a step of `batch` sequences of `tokens` tokens."""
        return self.kernel.with_numbers(*[value_of(polynomial, batch, tokens) for polynomial in self.polynomials])


class KernelTrace(NamedTuple):
    """The operators of the traced step, `shallow`, and of a step with one more group of layers, `deep`: their indices
    in `formulas`, in the order in which they run. Both are empty if other sizes run different operators."""

    formulas: tuple[KernelFormula, ...] = ()
    shallow: tuple[int, ...] = ()
    deep: tuple[int, ...] = ()

    def at(self, batch: int, tokens: int) -> tuple[Sequence[Kernel], Sequence[Kernel]]:
        """Return the operators of both steps; equal operators are the same object."""
        kernels = [formula.at(batch, tokens) for formula in self.formulas]
        return [kernels[number] for number in self.shallow], [kernels[number] for number in self.deep]
