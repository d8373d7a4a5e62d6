"""ModelSpec: the sizes of a language model, read from its config without torch.

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

# Keys of a config.json that do not affect the model's shape. The run sets dtype, attention and quantization, and
# auto_map would download code.
NOT_SHAPE = (
    "_attn_implementation", "_name_or_path", "auto_map", "dtype", "quantization_config", "torch_dtype",
    "transformers_version",
)


@dataclass(frozen=True, repr=False)
class ModelSpec(Sizes):
    """A model's sizes and the numbers that follow from them. Create one with `model(...)`; the fields are those of
    `Sizes`."""

    def __post_init__(self) -> None:
        for name, value in shape_of(self.config, self.source or self.name).items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:  # of few fields, because an estimate looks a spec up in a dozen caches
        return hash((self.name, self.hidden, self.layers))

    @property
    def config(self) -> dict[str, Any]:
        """A new transformers config dict, which may be changed: `AutoConfig.for_model(**spec.config)`."""
        return json.loads(self.config_json)

    @property
    def has_formulas(self) -> bool:
        """Whether formulas are written for this family. Any other counts as a plain transformer of the same sizes."""
        return self.family in FAMILIES

    @cached_property
    def rotary(self) -> bool:
        """Whether the model uses rotary positions, so that a step may have more tokens than the config has
        positions."""
        return is_rotary(self.family) if not self.has_formulas else not self.learned_positions

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """Every nn.Linear (GPT-2: Conv1D) of transformers' class: its name, its shape, and their number."""
        return linears(self)

    @cached_property
    def block_linears(self) -> tuple[Linear, ...]:
        """The linear layers of the blocks: all but the head."""
        return tuple(linear for linear in self.linears if linear.part != "head")

    @cached_property
    def block_linear_elements(self) -> int:
        """Elements of the blocks' linear weights, which autocast casts and quantization packs."""
        return sum(linear.elements for linear in self.block_linears)

    @cached_property
    def _components(self) -> dict[str, int]:
        sizes = components(self, self.linears)
        published = _presets().get(self.name, {}).get("parameters")
        return sizes if published is None else sizes | {"rest": published - sum(sizes.values())}

    @property
    def parameters_by_component(self) -> dict[str, int]:
        """Parameters of embedding, positions, attention, mlp, experts, router, norms, head; tied weights count once.

        `rest` is the difference between the published total of a preset without formulas and a plain transformer of the
        same sizes.
        """
        return dict(self._components)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model, with tied weights counted once: sum(p.numel() for p in model.parameters())."""
        return sum(self._components.values())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all except the routed experts that it is not sent to."""
        experts = self.parameters_by_component["experts"]
        return self.parameters - experts + (experts // self.experts * self.experts_per_token if self.experts else 0)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of the KV cache per token, summed over all layers: a key and a value for each kv head, or the latent
        and the rotary key of MLA (arXiv 2405.04434, section 2.1.3). Multiply by the bytes of the cache's dtype."""
        if self.mla:
            return self.layers * (self.mla.kv_lora_rank + self.mla.qk_rope_head_dim)
        return self.layers * 2 * self.kv_heads * self.head_dim

    def __repr__(self) -> str:
        return f"<ModelSpec: {self}>"

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
        """Return the content of its config.json."""


ModelLike = ModelSpec | str | os.PathLike[str] | Mapping[str, Any] | Config  # the types that `model` accepts


def model(source: ModelLike) -> ModelSpec:
    """Return the spec of a model, given a preset's name, a config.json or its folder, a config dict, or a transformers
    config.

    Names are case-insensitive and may omit the organisation: "gpt2", "llama-3.1-8b". Any other "organisation/model" is
    read from the Hugging Face cache, where `llmlab models --download` or another program stored it; nothing is
    downloaded here. A config may be of any family for which transformers has a language model. Raises UnknownName for
    a name that is none of these, and SpecError for an invalid config.
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
    """Return the names of the presets; `model` accepts each name and its aliases, with or without the organisation."""
    return list(_presets())


def _from_text(source: str | os.PathLike[str]) -> ModelSpec:
    text = os.fspath(source)
    if isinstance(source, str) and (name := _names().get(text.strip().lower())):
        return _preset(name)
    if isinstance(source, str) and not text.strip():
        raise SpecError("an empty text is not a model; give a preset's name, a config.json or its folder")
    # Unlike pathlib, os.path does not raise for an unknown user, a name that is too long, or a null byte.
    path = Path(os.path.expanduser(text))
    is_path = not isinstance(source, str) or text.startswith((".", "/", "~")) or "\\" in text  # a Windows path
    if is_path or path.suffix == ".json" or os.path.exists(path):
        return _from_file(path / "config.json" if os.path.isdir(path) else path)
    if "/" in text and (cached := cached_config(text)) is not None:
        return _from_config(_read(cached), text, text)
    names = [*_presets(), *(alias for preset in _presets().values() for alias in preset["aliases"])]
    if "/" not in text:  # without an organisation, compare only the part of each name after the slash
        names += [name.rpartition("/")[2] for name in names]
    hub = text if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) else "OWNER/NAME"
    advice = "Give a name listed by `llmlab models`, pass the path of a config.json, or run "
    raise unknown_name("model", text, names, f"{advice}`llmlab models --download {hub}`.")


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
    except ValueError as error:  # a null byte, or characters that no file name can have
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
    quantization = config.get("quantization_config")
    checkpoint = published_format(quantization) if isinstance(quantization, Mapping) else ""
    try:
        text = json.dumps(shape)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where}: {error}; a config holds only what JSON can") from None
    # A changed config must not get the name of the preset that it came from, because records are looked up by name.
    preset = _names().get(claimed.lower())
    spec = ModelSpec(preset or claimed or f"custom-{config.get('model_type')}", text, where, checkpoint)
    if preset and spec != _preset(preset):
        return ModelSpec(f"{claimed} (changed)", text, where, checkpoint)
    return spec


def published_format(quantization: Mapping[str, Any]) -> str:
    """Return the format of the weights that a config's `quantization_config` describes, in the names of `lab.Service`;
    for others, the method's name and bits.

    >>> published_format({"quant_method": "gptq", "bits": 8}), published_format({"quant_method": "fbgemm_fp8"})
    ('int8', 'fp8')
    """
    method = str(quantization.get("quant_method") or "")
    if method == "compressed-tensors":
        groups = quantization.get("config_groups") or {}
        weights = next((group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)), {})
        known = {"8 float": "fp8", "8 int": "int8", "4 int": "gptq", "4 float": "nvfp4"}
        return known.get(f"{weights.get('num_bits')} {weights.get('type')}", method)
    if method == "modelopt":
        return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(quantization.get("quant_algo")), method)
    bits = quantization.get("bits", 4) if method in ("gptq", "awq") else 4
    if bits != 4:
        return "int8" if bits == 8 else f"{method} in {bits} bits"
    return "fp8" if method == "fbgemm_fp8" else method


@cache
def _presets() -> dict[str, dict[str, Any]]:
    """Return the presets by name, from presets/*.json, each with its source, its aliases and its config."""
    folder = sorted(files(__package__).joinpath("presets").iterdir(), key=lambda file: file.name)
    presets: dict[str, dict[str, Any]] = {}
    for file in folder:
        if file.name.endswith(".json"):
            presets |= json.loads(file.read_text(encoding="utf-8"))
    return presets


@cache
def _preset(name: str) -> ModelSpec:
    entry = _presets()[name]
    return ModelSpec(name, json.dumps(entry["config"]), entry["source"], entry.get("checkpoint", ""))


@cache
def _names() -> dict[str, str]:
    """Return the preset for each spelling in lower case; a full name takes precedence over another's short one."""
    short, full = {}, {}
    for name, preset in _presets().items():
        for spelling in (name, *preset["aliases"]):
            full[spelling.lower()] = name
            short[spelling.rpartition("/")[2].lower()] = name
    return short | full
