"""A plugin for pytest: nbval compares the numbers in a cell's outputs as numbers, within the cell's tolerance.

    python -m pytest -p tools.numeric_outputs --nbval book

Another processor sums floating-point numbers in another order, so a loss that tensors computed can differ in its last
digits. The metadata of such a cell states a relative tolerance, in the MyST source `tolerance: 0.01`: words must be the
same, and each number must be within that distance of the committed one. Without it a cell's outputs are compared
character by character.
"""

from __future__ import annotations

import re
from copy import deepcopy
from decimal import Decimal
from typing import Any

from nbval.plugin import IPyNbCell

# Not the 16 of bf16, and no comma that separates two numbers.
NUMBER = re.compile(r"(?<![\w.,])[-−+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def pytest_itemcollected(item: Any) -> None:
    if isinstance(item, IPyNbCell) and (tolerance := item.cell.metadata.get("tolerance")):
        compare = item.compare_outputs
        item.compare_outputs = lambda test, reference, *rest: compare(
            settle(test, reference, tolerance), reference, *rest
        )


def settle(test: list[dict[str, Any]], reference: list[dict[str, Any]], tolerance: float) -> list[dict[str, Any]]:
    """Return `test`'s outputs, with a number that agrees with the reference's replaced by it."""
    outputs = deepcopy(test)
    for output, expected in zip(outputs, reference, strict=False):  # nbval reports a missing or an additional output
        for texts, others in ((output, expected), (output.get("data", {}), expected.get("data", {}))):
            for key, text in texts.items():
                if isinstance(text, str) and isinstance(others.get(key), str):
                    texts[key] = settle_text(text, others[key], tolerance)
    return outputs


def settle_text(test: str, reference: str, tolerance: float) -> str:
    """Return `test` with each number that agrees with the reference's replaced by it; as it is if the words differ.

    How wide a column is depends on its numbers, so only where there is white space counts, not how much.
    """
    words, expected = NUMBER.split(test), NUMBER.split(reference)
    if [" ".join(f"|{text}|".split()) for text in words] != [" ".join(f"|{text}|".split()) for text in expected]:
        return test
    pairs = zip(NUMBER.findall(test), NUMBER.findall(reference), strict=True)
    numbers = [theirs if agree(ours, theirs, tolerance) else ours for ours, theirs in pairs]
    return "".join(part for pair in zip(expected, [*numbers, ""], strict=True) for part in pair)


def agree(a: str, b: str, tolerance: float) -> bool:
    """Whether two printed numbers can be roundings of numbers whose relative difference is at most `tolerance`."""
    x, y = (Decimal(text.replace(",", "").replace("−", "-")) for text in (a, b))
    # A count is exact; what was printed with a decimal point was rounded, by up to half a unit of its last digit.
    rounding = max(Decimal(10) ** n.as_tuple().exponent if "." in text else 0 for n, text in ((x, a), (y, b)))
    return abs(x - y) <= Decimal(tolerance) * max(abs(x), abs(y)) + rounding
