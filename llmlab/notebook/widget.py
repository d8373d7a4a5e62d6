"""The calculator in a notebook. Light to import: the formulas and anywidget come with the first call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..base.errors import NotAvailable, SpecError


def calculator(**state: Any) -> Any:
    """Return the calculator as a widget: the book's page "Will it fit?" in a notebook, with this kernel's llmlab.

    `state` are fields to begin with, named as in the form: model, gpu, gpus, kind ("training", "serving"
    or "planning"), and those of Training, Inference or a plan. Raises NotAvailable without anywidget, SpecError for an
    unknown field.
    """
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError as error:
        raise NotAvailable(f"the calculator needs {error.name}: pip install anywidget") from None
    from .calculator import KINDS, answer, form
    from .fields import text_of

    shown = form()
    known = {*shown["defaults"], *(field["name"] for kind in KINDS for field in shown[kind])}
    if unknown := sorted(set(state) - known):
        raise SpecError(f"{', '.join(unknown)} is no field of the calculator; it has {', '.join(sorted(known))}")
    start = {name: text_of(value) for name, value in state.items()}
    here = Path(__file__).parent

    class Calculator(anywidget.AnyWidget):
        _esm = (here / "calculator.mjs").read_text(encoding="utf-8")
        style = traitlets.Unicode((here / "calculator.css").read_text(encoding="utf-8")).tag(sync=True)
        form = traitlets.Dict(shown).tag(sync=True)
        state = traitlets.Dict(start).tag(sync=True)

    widget = Calculator()
    widget.on_msg(lambda _, message, buffers: widget.send({"id": message["id"], "got": answer(message["state"])}))
    return widget
