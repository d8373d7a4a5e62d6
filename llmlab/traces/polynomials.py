"""Polynomials in the sizes of a step, B sequences of T tokens, and interpolation through given points."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product
from typing import NamedTuple

MOST = 3  # monomials of a sum


class Monomial(NamedTuple):
    """`factor` · B ** `batch` · T ** `tokens`."""

    factor: float
    batch: int
    tokens: int


Polynomial = tuple[Monomial, ...]


def value_of(polynomial: Polynomial, batch: int, tokens: int) -> int:
    """Return the value at B sequences of T tokens.

    >>> value_of((Monomial(2.0, 1, 1), Monomial(5.0, 0, 0)), 4, 100)
    805
    """
    return round(sum([factor * batch**power * tokens**degree for factor, power, degree in polynomial]))


def constant(value: float) -> Polynomial:
    """Return the polynomial that is `value` everywhere."""
    return (Monomial(value, 0, 0),)


@lru_cache(maxsize=1 << 14)
def polynomial_through(values: tuple[int, ...], at: tuple[tuple[int, int], ...]) -> Polynomial | None:
    """Return the polynomial with the fewest monomials that has these `values` at these (B, T). It has at most `MOST`
    monomials, and at least one fewer than there are points. Return None if there is none.

    >>> polynomial_through((210, 410, 605, 810), ((1, 100), (2, 100), (3, 100), (4, 100))) is None
    True
    >>> polynomial_through((210, 410, 610, 810), ((1, 100), (2, 100), (3, 100), (4, 100)))
    (Monomial(factor=10.0, batch=0, tokens=0), Monomial(factor=200.0, batch=1, tokens=0))
    """
    degrees = range(3 if len({tokens for _, tokens in at}) > 1 else 1)
    powers = list(product(range(3), degrees))
    for count in range(1, min(MOST, len(at) - 1) + 1):
        for chosen in combinations(powers, count):
            rows = [[batch**power * tokens**degree for power, degree in chosen] for batch, tokens in at]
            factors = _solved(rows, values)
            if factors:
                pairs = zip(factors, chosen, strict=True)
                return tuple(Monomial(float(factor), *power) for factor, power in pairs)
    return None


def _solved(rows: Sequence[Sequence[int]], values: Sequence[int]) -> list[Fraction] | None:
    """Return the unique solution of at least as many equations as unknowns, by Gauss-Jordan elimination, or None."""
    system = [[Fraction(number) for number in (*row, value)] for row, value in zip(rows, values, strict=True)]
    unknowns = len(rows[0])
    for column in range(unknowns):
        pivot = next((number for number in range(column, len(system)) if system[number][column]), None)
        if pivot is None:
            return None
        system[column], system[pivot] = system[pivot], system[column]
        system[column] = [value / system[column][column] for value in system[column]]
        for number, row in enumerate(system):
            if number != column:
                system[number] = [a - row[column] * b for a, b in zip(row, system[column], strict=True)]
    if any(row[-1] for row in system[unknowns:]):
        return None
    return [row[-1] for row in system[:unknowns]]
