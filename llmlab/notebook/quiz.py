"""Exercises that check themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.display import Code


def check_answer(answer: float | None, truth: float, unit: str, tolerance: float = 0.02, hint: str = "") -> bool:
    """Print whether `answer` is within `tolerance` (relative) of `truth`, both in `unit`, and return it.

    None asks for an answer. The truth is never printed for a wrong answer: the hint is.
    """
    right = answer is not None and abs(answer - truth) <= tolerance * abs(truth)
    if answer is None:
        print(f"Your turn: put a number, in {unit}, where None stands, and run the cell again.")
    elif right:
        print(f"Right: {truth:,.4g} {unit}.")
    else:
        size = "large" if answer > truth else "small"
        print(f"Not yet: {answer:,.4g} {unit} is too {size}. {hint}".rstrip())
    return right


Facts = Mapping[str, Callable[..., object]]  # what must hold of a function, and whether it does


def broken(function: Callable[..., object], facts: Facts) -> dict[str, str]:
    """Return the `facts` that do not hold of a reader's `function`, each with the reason; {} if all hold.

    A fact's key says what must hold; its value takes the function and returns whether it does. A stub raises
    NotImplementedError, which is passed on.
    """
    reasons = {}
    for fact, holds in facts.items():
        try:
            if not holds(function):
                reasons[fact] = "does not hold"
        except NotImplementedError:
            raise
        except Exception as error:  # the reader's code may raise anything
            reasons[fact] = f"{type(error).__name__}: {error}"
    return reasons


def check_function(function: Callable[..., object], facts: Facts) -> bool:
    """Print which `facts` hold of a reader's `function`, and return whether all do; it never raises.

    A stub that raises NotImplementedError is asked for.
    """
    try:
        reasons = broken(function, facts)
    except NotImplementedError:
        print(f"Your turn: write {function.__name__}, and run its cell and this one again.")
        return False
    if not reasons:
        print(f"Right: {', '.join(facts)}.")
    else:
        print("Not yet:", *(f"- {fact}: {reasons.get(fact, 'holds')}" for fact in facts), sep="\n")
    return not reasons


def show_source(*objects: Callable[..., object] | ModuleType) -> Code:
    """Return the source of functions, classes or modules, from the file they live in, for a notebook to display."""
    import inspect

    from IPython.display import Code

    return Code("\n\n".join(inspect.getsource(one) for one in objects), language="python")
