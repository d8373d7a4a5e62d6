"""The operators of a step as a card sees them, with numbers or with polynomials of the step's sizes in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .polynomials import Polynomial, value_of


class Kernel(NamedTuple):
    """One operator: `kind` is "matmul", "attention", "attention backward", "gather", "strided", "serial", "memory",
    "sent" (a collective, whose time is no kernel's: formulas/time/distributed.py) or "none" (a view): what its time
    depends on.

    `shape` is (batch, M, N, K) of a product, (batch · heads, T, S, head size, causal) of attention, else (elements of
    the largest tensor,). `launches` is how many kernels it starts, `backward` whether autograd's engine calls it,
    `phase` the phase of the step it runs in. `again` bytes more are moved where rows of `row` bytes do not fit in the
    cache. `compiled`: a graph that torch.compile made starts it, not Python, operator by operator.
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
        """What depends on the sizes of a step."""
        return self.flops, self.bytes, self.launches, self.again, self.row, *self.shape

    def with_numbers(self, flops: int, size: int, launches: int, again: int, row: int, *shape: int) -> Kernel:
        """Return this operator with other `numbers`."""
        return self._replace(flops=flops, bytes=size, launches=launches, again=again, row=row, shape=shape)


class KernelFormula(NamedTuple):
    """An operator whose numbers are polynomials, in the order of `Kernel.numbers`; those of `kernel` do not count."""

    kernel: Kernel
    polynomials: tuple[Polynomial, ...]

    def at(self, batch: int, tokens: int) -> Kernel:
        """Return the operator of a step of `batch` sequences of `tokens` tokens."""
        return self.kernel.with_numbers(*[value_of(polynomial, batch, tokens) for polynomial in self.polynomials])


class KernelTrace(NamedTuple):
    """The operators of the traced step, and of one with a further group of layers: the numbers of `formulas` in the
    order in which they run. Both are empty where other sizes run others."""

    formulas: tuple[KernelFormula, ...] = ()
    shallow: tuple[int, ...] = ()
    deep: tuple[int, ...] = ()

    def at(self, batch: int, tokens: int) -> tuple[Sequence[Kernel], Sequence[Kernel]]:
        """Return the operators of both steps, equal ones as one object."""
        kernels = [formula.at(batch, tokens) for formula in self.formulas]
        return [kernels[number] for number in self.shallow], [kernels[number] for number in self.deep]
