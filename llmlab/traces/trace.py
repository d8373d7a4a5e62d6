"""A trace: the memory that a step of the real code has allocated at its highest moments, as polynomials in its sizes.

    B  sequences     T  tokens per sequence     n  further groups of layers

The bytes of a tensor are a polynomial in B and T, which the allocator rounds up. A moment is a set of live tensors that
no other moment contains. Each further group of layers adds the same tensors to it, so the sum is linear in n. A trace
has the moments of the first and the last layers only: in the forward pass, a layer in between has fewer bytes than the
last one, and in the backward pass, its bytes lie on a line between those of the last and the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..base.terms import PARTS
from .kernels import Kernel, KernelFormula, KernelTrace
from .polynomials import Monomial, Polynomial, value_of

# c10/core/AllocatorConfig.h: every request is rounded up to BLOCK bytes. A request of LARGE bytes or more gets its own
# segment, a multiple of SEGMENT. The rest of the segment is split off if it exceeds REST; otherwise it counts as
# allocated.
BLOCK, LARGE, SEGMENT, REST = 512, 10 * 2**20, 2 * 2**20, 2**20


def block_of(size: int) -> int:
    """Return the bytes that the caching allocator allocates for a request of `size` bytes, in a new segment.

    >>> block_of(1), block_of(12 * 2**20 - 2**19) == 12 * 2**20
    (512, True)
    """
    rounded = -(-size // BLOCK) * BLOCK
    rest = -rounded % SEGMENT
    return rounded + rest if rounded >= LARGE and rest <= REST else rounded


class Term(NamedTuple):
    """Tensors whose size in bytes is the polynomial `formula`.

    `part` is their part of the report. `module` and `operator` say where the code allocates them; the numbers of layers
    are replaced by *.
    """

    formula: Polynomial
    part: str
    module: str
    operator: str

    def size(self, batch: int, tokens: int) -> int:
        """Return the requested bytes of one tensor."""
        return value_of(self.formula, batch, tokens)

    def bytes(self, batch: int, tokens: int) -> int:
        """Return the bytes that the allocator allocates for one tensor."""
        return block_of(self.size(batch, tokens))


LOADED = "its end"  # the place of the moment at which loading is done


class Moment(NamedTuple):
    """The tensors that are alive in `phase` when `place` allocates memory.

    `counts` maps the number of a term to the number of its tensors in the traced layers and in each further group.
    """

    phase: str
    place: str
    counts: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class Trace:
    """The terms, moments and operators of a step, whose model has `groups` more groups of layers than the smallest one.
    `fixed`: how many sizes must be those of the derivation: T (polynomials are in B alone), or B as well (constants).
    """

    groups: int
    fixed: int
    terms: tuple[Term, ...]
    moments: tuple[Moment, ...]
    kernels: KernelTrace

    def totals(self, batch: int, tokens: int, groups: int | None = None) -> list[int]:
        """Return the bytes of each moment, with `groups` further groups (by default, those of the model)."""
        more = self.groups if groups is None else groups
        sizes = [term.bytes(batch, tokens) for term in self.terms]
        return [
            sum([sizes[term] * (base + more * per_group) for term, (base, per_group) in moment.counts.items()])
            for moment in self.moments
        ]

    def parts(self, moment: Moment, batch: int, tokens: int) -> dict[str, int]:
        """Return the bytes of a moment by part of a report."""
        sizes: dict[str, int] = {}
        for number, (base, per_group) in moment.counts.items():
            term = self.terms[number]
            part = term.part if term.part in PARTS else "other"
            count = base + self.groups * per_group
            sizes[part] = sizes.get(part, 0) + count * term.bytes(batch, tokens)
        return sizes

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trace:
        """Return the trace that `to_dict` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        terms = (Term(_polynomial(formula), *rest) for formula, *rest in data["terms"])
        moments = (
            Moment(phase, place, {int(term): (base, per_group) for term, (base, per_group) in counts.items()})
            for phase, place, counts in data["moments"]
        )
        formulas, *orders = data["kernels"]
        kernels = (
            KernelFormula(Kernel(*kernel)._replace(shape=()), tuple(map(_polynomial, polynomials)))
            for kernel, polynomials in formulas
        )
        operators = KernelTrace(tuple(kernels), *map(tuple, orders))
        return cls(int(data["groups"]), int(data["fixed"]), tuple(terms), tuple(moments), operators)


def _polynomial(monomials: Iterable[Sequence[Any]]) -> Polynomial:
    return tuple(Monomial(*monomial) for monomial in monomials)
