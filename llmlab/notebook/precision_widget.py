"""The bits of one number in every format, to read as a table and to play with where a page may run scripts.

The HTML is complete without its script: a viewer that removes scripts shows the number it was made for.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files

from ..course.techniques.precision import FORMATS, Format

EXAMPLES = ("0.1", "1.001", "65504", "65520", "1e-5", "1e-8", "16777217")


class FloatWidget:
    """`value` in all six formats: HTML with buttons for bits in a notebook or on the site, bits as text elsewhere."""

    def __init__(self, value: float = 0.1) -> None:
        self.value = float(value)

    def __repr__(self) -> str:
        rows = (f"{name:9}{' '.join(fields(f, self.value)):36}{f.round(self.value)!r}" for name, f in FORMATS.items())
        return "\n".join([f"{self.value!r}: sign, exponent, mantissa", *rows])

    def _repr_html_(self) -> str:
        rows = "".join(_row(f, self.value) for f in FORMATS.values())
        examples = "".join(f'<button type="button" data-set="{example}">{example}</button>' for example in EXAMPLES)
        key = " ".join(f'<span class="bit {name}">{name}</span>' for name in ("sign", "exponent", "mantissa"))
        code = files(__package__).joinpath("precision_widget.html").read_text(encoding="utf-8")
        return (
            f'<div class="llmlab-float" data-value="{self.value!r}">'
            f'<div class="controls" hidden><label>a number <input type="text" inputmode="decimal" '
            f'value="{self.value!r}"></label>{examples}</div>'
            f'{rows}<div class="key">{key} <span class="live" role="status" aria-live="polite"></span></div></div>'
            f"{code}"
        )


def fields(f: Format, value: float) -> tuple[str, str, str]:
    """Return the bits of `value` in format `f`: sign, exponent and mantissa, as text.

    >>> fields(FORMATS["bf16"], -1.5)
    ('1', '01111111', '1000000')
    """
    bits = f"{f.encode(value):0{f.bits}b}"
    return bits[0], bits[1 : 1 + f.exponent], bits[1 + f.exponent :]


def _row(f: Format, value: float) -> str:
    names = ("sign", "exponent", "mantissa")
    bits = "".join(
        f'<span class="bit {name}" data-bit="{bit}">{bit}</span>'
        for name, part in zip(names, fields(f, value), strict=True)
        for bit in part
    )
    facts = {"name": f.name, "exponent": f.exponent, "mantissa": f.mantissa, "bias": f.bias, "top": f.top,
             "infinities": f.infinities}  # fmt: skip
    text = f"{f.name} keeps {f.round(value)!r}"
    return (
        f"<div class=\"format\" role=\"group\" aria-label=\"{f.name}\" data-format='{escape(json.dumps(facts))}'>"
        f'<div class="said">{text}</div><div class="bits">{bits}</div></div>'
    )
