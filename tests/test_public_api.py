"""The names that others import, with their signatures, as tests/public_api.txt has them.

A name that others use must not vanish unnoticed. If a change is intended, write the list anew:
`python tests/test_public_api.py`.
"""

import importlib
import inspect
from pathlib import Path

import llmlab as lab

LIST = Path(__file__).with_name("public_api.txt")
PACKAGES = ("course.kernels", "course.quantize", "course.inference", "course.evaluate", "plots")  # all that they export


def described(name, thing):
    """A line for the thing, and one for each attribute that a class has of ours."""
    if inspect.ismodule(thing):
        own = {
            key: value
            for key, value in vars(thing).items()
            if callable(value) and getattr(value, "__module__", None) == thing.__name__
        }
        return [line for key in sorted(own) if key[0] != "_" for line in described(f"{name}.{key}", own[key])]
    if not inspect.isclass(thing):
        return [f"{name}{inspect.signature(thing)}"]
    lines = [f"class {name}" if issubclass(thing, Exception) else f"class {name}{inspect.signature(thing)}"]
    ours = {}
    for owner in reversed(thing.__mro__):
        ours |= vars(owner) if owner.__module__.startswith("llmlab") else {}
    for key, value in sorted(ours.items()):
        if key[0] != "_" and inspect.isfunction(value):
            lines.append(f"  {key}{inspect.signature(value)}")
        elif key[0] != "_" and isinstance(value, property):
            lines.append(f"  {key}")
    return lines


def public():
    """All lines, in order."""
    homes = {"lab": lab, **{name.split(".")[-1]: importlib.import_module(f"llmlab.{name}") for name in PACKAGES}}
    return [
        line
        for short, home in homes.items()
        for name in sorted(home.__all__)
        for line in described(f"{short}.{name}", getattr(home, name))
    ]


def test_names_and_signatures_are_those_of_the_list():
    assert public() == LIST.read_text(encoding="utf-8").splitlines(), "intended? then see the head of this file"


def test_functions_hide_no_module():
    """`import llmlab.X.Y as m` raises where a function of the package bears X's name."""
    for name in lab.__all__:
        assert not (Path(lab.__file__).parent / name).is_dir(), name
        assert not (Path(lab.__file__).parent / f"{name}.py").exists(), name


if __name__ == "__main__":
    LIST.write_text("\n".join(public()) + "\n", encoding="utf-8")
