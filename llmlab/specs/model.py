"""ModelSpec: what a language model consists of, as numbers, read without torch.

    >>> spec = model("Llama-3.1-8B")
    >>> print(spec)
    meta-llama/Llama-3.1-8B: 8.03B parameters, 32 layers × 4096, 32 heads (8 kv) × 128, MLP 14336, vocabulary 128256
    >>> spec.parameters, spec.parameters_by_component["attention"]
    (8030261248, 1342177280)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from ..base.errors import SpecError, unknown_name
from ..base.units import show_count
from .generic import auto_class, is_rotary
from .hub_cache import cached_config
from .parameters import Linear, components, linears
from .shape import FAMILIES, MLA, shape_of
from .sizes import Sizes

__all__ = ["FAMILIES", "MLA", "Linear", "ModelLike", "ModelSpec", "model", "models"]

# Keys of a config.json that say nothing of the model's shape. The run decides dtype, attention and quantization;
# auto_map would fetch code from a hub.
NOT_SHAPE = (
    "_attn_implementation", "_name_or_path", "auto_map", "dtype", "quantization_config", "torch_dtype",
    "transformers_version",
)


@dataclass(frozen=True)
class ModelSpec(Sizes):
    """A model's sizes, and what follows from them. Make one with `model(...)`; the fields are those of `Sizes`."""

    def __post_init__(self) -> None:
        for name, value in shape_of(self.config, self.source or self.name).items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:  # of few fields: an estimate looks a spec up in a dozen caches
        return hash((self.name, self.hidden, self.layers))

    @property
    def config(self) -> dict[str, Any]:
        """A transformers config dict, yours to change: `AutoConfig.for_model(**spec.config)`."""
        return json.loads(self.config_json)

    @property
    def has_formulas(self) -> bool:
        """Whether this family's own tensors are described; any other counts as a plain transformer of its sizes."""
        return self.family in FAMILIES

    @cached_property
    def rotary(self) -> bool:
        """Whether positions are rotated, so that a step may have more tokens than the config's positions."""
        return is_rotary(self.family) if not self.has_formulas else not self.learned_positions

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """Every nn.Linear (GPT-2: Conv1D) of transformers' class: name, shape, and how many there are."""
        return linears(self)

    @cached_property
    def block_linears(self) -> tuple[Linear, ...]:
        """The linears of the blocks: all but the head."""
        return tuple(linear for linear in self.linears if linear.part != "head")

    @cached_property
    def block_linear_elements(self) -> int:
        """Elements of the blocks' linear weights, which autocast casts and quantization packs."""
        return sum(linear.elements for linear in self.block_linears)

    @cached_property
    def _components(self) -> dict[str, int]:
        found = components(self, self.linears)
        published = _presets().get(self.name, {}).get("parameters")
        return found if published is None else found | {"rest": published - sum(found.values())}

    @property
    def parameters_by_component(self) -> dict[str, int]:
        """Parameters of embedding, positions, attention, mlp, experts, router, norms, head; tied weights once.

        `rest` is what a preset of a family without formulas has in addition to a plain transformer of its sizes.
        """
        return dict(self._components)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model, tied weights once: sum(p.numel() for p in model.parameters())."""
        return sum(self._components.values())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all, less the routed experts it is not sent to."""
        experts = self.parameters_by_component["experts"]
        return self.parameters - experts + (experts // self.experts * self.experts_per_token if self.experts else 0)

    @property
    def router_bias(self) -> int:
        """Elements of DeepSeek-V3's expert-selection bias (arXiv 2412.19437, section 2.1.2), a buffer, no parameter.

        The published total counts it: 671 026 419 200 is `parameters` + 58 layers × 256.
        """
        return self.moe_layers * self.experts if self.family == "deepseek_v3" else 0

    @property
    def kv_elements_per_token(self) -> int:
        """Elements the KV cache holds for one token over all layers: a key and a value for each kv head, or MLA's
        latent and its rotary key (arXiv 2405.04434, section 2.1.3). Multiply by the bytes of the cache's dtype."""
        if self.mla:
            return self.layers * (self.mla.kv_lora_rank + self.mla.qk_rope_head_dim)
        return self.layers * 2 * self.kv_heads * self.head_dim

    def __str__(self) -> str:
        width = f"{self.heads} heads" + (f" ({self.kv_heads} kv)" if self.kv_heads != self.heads else "")
        parts = [
            f"{self.name}: {show_count(self.parameters)} parameters",
            f"{self.layers} layers × {self.hidden}",
            f"{width} × {self.head_dim}",
        ]
        if not self.experts or self.dense_layers:
            parts.append(f"MLP {self.intermediate}")
        if self.experts:
            active = show_count(self.active_parameters)
            shared = f" + {self.shared_experts} shared" if self.shared_experts else ""
            parts.append(f"{self.experts} experts{shared} × {self.moe_intermediate}")
            parts.append(f"{self.experts_per_token} per token ({active} active)")
        return ", ".join([*parts, f"vocabulary {self.vocab}"])


class Config(Protocol):
    """A transformers config, as far as `model` reads it."""

    def to_dict(self) -> dict[str, Any]:
        """Return what its config.json holds."""


ModelLike = ModelSpec | str | os.PathLike[str] | Mapping[str, Any] | Config  # what `model` takes


def model(source: ModelLike) -> ModelSpec:
    """Return the spec of a preset's name, a config.json or its folder, a config dict, or a transformers config.

    Names are read without regard to case, with or without the organisation: "gpt2", "llama-3.1-8b". Another
    "organisation/model" is read from Hugging Face's cache, where `llmlab models --download` or a library of theirs put
    it; nothing is fetched here. A config may be of any family that transformers has a language model of. Raises
    UnknownName for a name that is none of these, SpecError for a config that cannot be.
    """
    if isinstance(source, ModelSpec):
        return source
    if isinstance(source, Mapping):
        return _from_config(source, str(source.get("_name_or_path") or ""), "config")
    if isinstance(source, (str, os.PathLike)):
        return _from_text(source)
    if callable(getattr(source, "to_dict", None)):
        config = source.to_dict()
        if isinstance(config, Mapping):
            claimed = getattr(source, "name_or_path", None) or config.get("_name_or_path")
            return _from_config(config, str(claimed or ""), type(source).__name__)
    raise SpecError(
        f"a {type(source).__name__} is not a model; give a preset's name, a config.json, its folder or dict, or a "
        "transformers config"
    )


def models() -> list[str]:
    """Return the presets' names; `model` takes each, its aliases, and either without the organisation."""
    return list(_presets())


def _from_text(source: str | os.PathLike[str]) -> ModelSpec:
    text = os.fspath(source)
    if isinstance(source, str) and (name := _names().get(text.strip().lower())):
        return _preset(name)
    if isinstance(source, str) and not text.strip():
        raise SpecError("an empty text is not a model; give a preset's name, a config.json or its folder")
    # os.path answers where pathlib raises: for a user that is not there, a name too long, a null byte.
    path = Path(os.path.expanduser(text))
    meant = not isinstance(source, str) or text.startswith((".", "/", "~")) or "\\" in text  # of Windows
    if meant or path.suffix == ".json" or os.path.exists(path):
        return _from_file(path / "config.json" if os.path.isdir(path) else path)
    if "/" in text and (cached := cached_config(text)) is not None:
        return _from_config(_read(cached), text, text)
    known = [*_presets(), *(alias for preset in _presets().values() for alias in preset["aliases"])]
    if "/" not in text:  # people leave out the organisation: the nearest name is found by what comes after the slash
        known += [name.rpartition("/")[2] for name in known]
    hub = text if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) else "OWNER/NAME"
    where = "Give a name listed by `llmlab models`, pass the path of a config.json, or run "
    raise unknown_name("model", text, known, f"{where}`llmlab models --download {hub}`.")


def _from_file(path: Path) -> ModelSpec:
    config = _read(path)
    folder_or_stem = path.absolute().parent.name if path.name == "config.json" else path.stem
    return _from_config(config, str(config.get("_name_or_path") or folder_or_stem), str(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; give a config.json, its folder, or a preset's name") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}; give a model's config.json") from None
    except ValueError as error:  # a null byte, letters that no file name has
        raise SpecError(f"{str(path)!r} cannot be a path: {error}; give a preset's name or a config.json") from None
    if not isinstance(config, dict):
        raise SpecError(f"{path} holds a {type(config).__name__}; a config.json is a JSON object")
    return config


def _from_config(config: Mapping[str, Any], claimed: str, where: str) -> ModelSpec:
    family = config.get("model_type")
    if config.get("auto_map") and auto_class(str(family)) is None:
        raise SpecError(f"{where}: model_type={family!r} brings its own code (auto_map), which llmlab never runs; give "
                        "a config of a family that transformers has")  # fmt: skip
    shape = {key: value for key, value in config.items() if key not in NOT_SHAPE}
    try:
        text = json.dumps(shape)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where}: {error}; a config holds only what JSON can") from None
    # A config that was changed must not pass for the preset it began as: records are looked up by name.
    preset = _names().get(claimed.lower())
    spec = ModelSpec(preset or claimed or f"custom-{config.get('model_type')}", text, where)
    if preset and spec != _preset(preset):
        return ModelSpec(f"{claimed} (changed)", text, where)
    return spec


@cache
def _presets() -> dict[str, dict[str, Any]]:
    """Presets by name, from presets/*.json: where the numbers are published, other names, the config."""
    folder = sorted(files(__package__).joinpath("presets").iterdir(), key=lambda file: file.name)
    presets: dict[str, dict[str, Any]] = {}
    for file in folder:
        if file.name.endswith(".json"):
            presets |= json.loads(file.read_text(encoding="utf-8"))
    return presets


@cache
def _preset(name: str) -> ModelSpec:
    entry = _presets()[name]
    return ModelSpec(name, json.dumps(entry["config"]), entry["source"])


@cache
def _names() -> dict[str, str]:
    """Return every spelling, lower-case, and the preset it means; a full name wins over another's short one."""
    short, full = {}, {}
    for name, preset in _presets().items():
        for spelling in (name, *preset["aliases"]):
            full[spelling.lower()] = name
            short[spelling.rpartition("/")[2].lower()] = name
    return short | full
