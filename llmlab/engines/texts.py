"""Settings as YAML or TOML text for engines, for values that JSON supports as well."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def _value(value: Any) -> str:
    text = json.dumps(value)
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)  # YAML 1.1 reads 1e+30 as a string


def yaml_text(settings: Mapping[str, Any], indent: str = "") -> str:
    """Return `settings` as YAML; text of several lines becomes a literal block, and None becomes null."""
    lines = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{yaml_text(value, indent + '  ')}")
        elif isinstance(value, str) and "\n" in value:
            lines.append(f"{indent}{key}: |\n" + "".join(f"{indent}  {line}\n" for line in value.splitlines()))
        else:
            lines.append(f"{indent}{key}: {_value(value)}\n")
    return "".join(lines)


def toml_text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections of settings as TOML. TOML has no null, so no value may be None."""
    tables = ("".join(f"{key} = {_value(value)}\n" for key, value in section.items()) for section in sections.values())
    return "\n".join(f"[{name}]\n{table}" for name, table in zip(sections, tables, strict=True))
