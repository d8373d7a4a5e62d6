"""Explains a trace: the formula of a step's peak, with a row for each group of equal tensors that are alive then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement, product
from math import prod
from typing import Any

from ..base.tables import Table
from ..base.units import show_bytes
from ..specs.model import ModelSpec
from ..specs.run import Training
from .polynomials import Monomial, Polynomial
from .trace import Trace

STATES = {"weights", "gradients", "optimizer"}  # parts whose tensors do not depend on B and T
SHOWN = 24  # rows of the printed table; one more row sums the rest
FACTORS = 64  # the largest factor, bytes of an element included, before the sizes of a model
# The names of a model's sizes in formulas, in order of preference, with their LaTeX.
LATEX = {"hidden": "h", "intermediate": "f", "vocab": "V", "heads·head_dim": "a d", "kv_heads·head_dim": "k d",
         "moe_intermediate": "f_e", "heads": "a", "kv_heads": "k", "head_dim": "d", "experts": "E"}  # fmt: skip


@dataclass(frozen=True)
class ExplainedTerm:
    """Tensors with the same formula: their `part` of the report, the `module` and the `operator` that allocate them,
    their number, and the bytes of all of them."""

    part: str
    module: str
    operator: str
    count: int
    formula: str
    latex: str
    bytes: int


@dataclass(frozen=True)
class Explanation:
    """The formula of the peak of a step of `batch` sequences of `tokens` tokens: `total` bytes in `phase`, at `place`.

    The total is the sum of `terms`, sorted from the largest to the smallest. Printing shows a table.
    """

    model: str
    phase: str
    place: str
    batch: int
    tokens: int
    total: int
    terms: tuple[ExplainedTerm, ...]

    def __str__(self) -> str:
        return str(self.table())

    def __rich_console__(self, *_: Any) -> Iterator[Table]:
        yield self.table()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def table(self) -> Table:
        """Return the terms as a table."""

        def row(term: ExplainedTerm) -> tuple[str, ...]:
            return term.part, term.module, term.operator, f"{term.count:,} ×", term.formula, show_bytes(term.bytes)

        rows = [row(term) for term in self.terms[:SHOWN]]
        if rest := self.terms[SHOWN:]:
            rows.append(("", f"{len(rest)} more", "", "", "", show_bytes(sum(term.bytes for term in rest))))
        rows.append(("sum", "", "", "", "", show_bytes(self.total)))
        title = f"{self.model}: the peak, in {self.phase} at {self.place}"
        sizes = f"B = {self.batch} sequences of S = {self.tokens:,} tokens"
        footer = f"{sizes}. Formulas give bytes; names such as hidden are fields of lab.model(...)."
        header = ("part", "module", "operator", "tensors", "bytes of each", "bytes")
        return Table(header, rows, title, footer, (0, 1, 2, 4))

    def latex(self) -> str:
        r"""Return the peak as a LaTeX sum: every formula times its count, without the allocator's rounding."""
        return " + ".join(f"{term.count} \\cdot {term.latex}" for term in self.terms)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values, sizes in bytes."""
        return asdict(self)


def explained(spec: ModelSpec, run: Training, trace: Trace) -> Explanation:
    """Return the formula of the highest moment of `trace` at the sizes of `run`."""
    batch, tokens = run.micro_batch, run.seq_len
    totals = trace.totals(batch, tokens)
    total = max(totals)
    moment = trace.moments[totals.index(total)]
    sizes, elements = _sizes(spec), _element_bytes(run)
    rows: dict[tuple[str, ...], tuple[int, int]] = {}
    for number, (base, per_group) in moment.counts.items():
        term, count = trace.terms[number], base + trace.groups * per_group
        if not count:
            continue
        formula = term.formula
        if trace.fixed and term.part not in STATES:
            fixed = (batch if trace.fixed == 2 else 1, tokens)
            grows = term.part in {"activations", "logits"} and "autocast" not in run.precision  # or a copy of a weight
            formula = tuple(_with_powers(monomial, fixed, grows, sizes, elements) for monomial in formula)
        plain, latex = _written(formula, sizes, elements)
        key = term.part, term.module or "(the step)", term.operator, plain, latex
        tensors, size = rows.get(key, (0, 0))
        rows[key] = tensors + count, size + count * term.bytes(batch, tokens)
    terms = (
        ExplainedTerm(part, module, operator, tensors, plain, latex, size)
        for (part, module, operator, plain, latex), (tensors, size) in rows.items()
    )
    ordered = tuple(sorted(terms, key=lambda term: -term.bytes))
    return Explanation(spec.name, moment.phase, moment.place, batch, tokens, total, ordered)


def _sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the sizes of a model by name; of equal sizes, only the preferred one."""
    known = {
        "hidden": spec.hidden, "intermediate": spec.intermediate, "vocab": spec.vocab,
        "heads·head_dim": spec.query_width, "kv_heads·head_dim": spec.key_width,
        "moe_intermediate": spec.moe_intermediate, "heads": spec.heads, "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim, "experts": spec.experts,
    }  # fmt: skip
    sizes: dict[str, int] = {}
    for name, size in known.items():
        if size > 1 and size not in sizes.values():
            sizes[name] = size
    return sizes


def _element_bytes(run: Training) -> set[int]:
    """Return the possible bytes per element of a step's floating-point tensors."""
    return {"fp32": {4}, "fp16": {2}, "bf16": {2}}.get(run.precision, {2, 4})


def _with_powers(
    monomial: Monomial, fixed: tuple[int, int], grows: bool, sizes: Mapping[str, int], elements: Set[int]
) -> Monomial:
    """Return `monomial` with the powers of B and T, the sizes `fixed`, which its trace could not vary. GPT-2, for
    example, allows no more than 1,024 tokens.

    The factor then contains these sizes. The likeliest powers are those that leave the bytes of an element, or of a
    mask, times the fewest sizes; if there are none, the lowest power of T. A tensor that `grows`, or that grows with B,
    also grows with T.
    """
    choices: list[tuple[bool, int, int, Monomial]] = []
    for more, tokens in product((0, 1) if fixed[0] > 1 else (0,), range(3)):
        factor, batch = monomial.factor / fixed[0] ** more / fixed[1] ** tokens, monomial.batch + more
        if factor == int(factor) and (tokens or not (batch or grows)):
            words, _ = _factored(factor, _known(sizes, tokens), elements)
            simple = words[0] in {"1", *map(str, elements)}
            rank = (len(words) + more + tokens, -more - tokens) if simple else (tokens, -more)
            choices.append((not simple, *rank, Monomial(factor, batch, tokens)))
    return min(choices)[-1] if choices else monomial


def _known(sizes: Mapping[str, int], tokens: int) -> Mapping[str, int]:
    """Return the sizes that may be factors of a tensor with T to the power of `tokens`: tensors with S² are scores, and
    their factor is the number of heads, although the head size may divide it too."""
    return {"heads": sizes["heads"]} if tokens == 2 and "heads" in sizes else sizes


def _written(formula: Polynomial, sizes: Mapping[str, int], elements: Set[int]) -> tuple[str, str]:
    """Return the formula of one tensor, as plain text and as LaTeX."""
    plain, latex = [], []
    for factor, batch, tokens in formula:
        words, symbols = _factored(factor, _known(sizes, tokens), elements)
        plain.append(" · ".join([*words, *_power("S", tokens, "²"), *_power("B", batch, "²")]))
        latex.append(" ".join([*symbols, *_power("S", tokens, "^2"), *_power("B", batch, "^2")]))
    return " + ".join(plain), " + ".join(latex)


def _power(name: str, power: int, square: str) -> list[str]:
    return [name + (square if power == 2 else "")] if power else []


def _factored(factor: float, sizes: Mapping[str, int], elements: Set[int]) -> tuple[list[str], list[str]]:
    """Return a coefficient as a small number times up to three sizes of the model, or as a plain number.

    Sizes are often multiples of one another: if the MLP is 4 times as wide as the model, 4 bytes · h · f is also
    1 byte · f · f. The small number is the bytes of an element if possible, otherwise the smallest one. Up to 8 bytes
    are one number, such as a token id, even if the model has 8 heads.
    """
    for count in (1, 2, 3) if factor > 8 else ():
        left = {names: factor / prod(sizes[name] for name in names)
                for names in combinations_with_replacement(sizes, count)}  # fmt: skip
        whole = {names: number for names, number in left.items() if number == int(number) and 0 < number <= FACTORS}
        if whole:
            names = min(whole, key=lambda names: (whole[names] not in elements, whole[names]))
            return [f"{whole[names]:.0f}", *names], [f"{whole[names]:.0f}", *(LATEX[name] for name in names)]
    return [f"{factor:,.10g}"], [f"{factor:.10g}"]
