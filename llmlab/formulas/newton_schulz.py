"""What Muon makes orthogonal: the matrices of blocks, by five Newton–Schulz iterations each (torch/optim/_muon.py).

With X a matrix or its transpose, R × C and R <= C, an iteration is A = X Xᵀ, B = b A + c A A, X = a X + B X, in bf16.
AdamW updates what is no such matrix: embedding, head, positions, norms, biases, and experts, which transformers keeps
in tensors of three axes.
"""

from __future__ import annotations

from ..specs.model import ModelSpec

ITERATIONS = 5


def matrices(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """Return the matrices of blocks as (R, C, how many of the model)."""
    shapes = [(linear.inputs, linear.outputs, linear.count) for linear in spec.block_linears]
    shapes += [(spec.hidden, spec.experts, spec.moe_layers)] if spec.experts else []  # the router
    return [(min(shape), max(shape), count) for *shape, count in shapes]


def elements(spec: ModelSpec, layers: int) -> int:
    """Return the elements of the matrices of `layers` of the model's layers."""
    return sum(rows * columns * count for rows, columns, count in matrices(spec)) * layers // spec.layers


def products(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """Return the products of an iteration on a matrix, as (m, n, k)."""
    return (rows, rows, columns), (rows, rows, rows), (rows, columns, rows)


def flop(spec: ModelSpec) -> int:
    """Return the FLOP of all matrices' iterations, on one device.

    >>> from llmlab.specs.model import model
    >>> f"{flop(model('gpt2')):.3g}"
    '1.52e+12'
    """
    return sum(2 * ITERATIONS * count * m * n * k
               for rows, columns, count in matrices(spec) for m, n, k in products(rows, columns))  # fmt: skip


def temporaries(spec: ModelSpec, gradient: int) -> int:
    """Return the bytes at the largest matrix as its X is made anew: the update, in `gradient` bytes per element, the
    old X and the new one, A and B."""
    return max(gradient * rows * columns + 2 * (2 * rows * columns + 2 * rows * rows)
               for rows, columns, _ in matrices(spec))  # fmt: skip
