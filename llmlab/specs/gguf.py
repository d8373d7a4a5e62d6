"""Sizes of number formats: bits per weight, and the bytes of a model's .gguf file, tensor by tensor.

>>> bits_per_weight("Q8_0"), bits_per_weight("Q4_K"), bits_per_weight("MXFP4")
(8.5, 4.5, 4.25)
>>> from llmlab.specs.model import model
>>> file_bytes(model("Llama-3.1-8B"), "Q4_K_M") / 1e9  # doctest: +ELLIPSIS
4.92...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ..base.errors import SpecError, unknown_name

if TYPE_CHECKING:
    from .model import ModelSpec

# Weights and bytes per block: ggml/src/ggml-common.h, the block_* structs.
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "MXFP4": (32, 17),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_XS": (256, 136), "IQ4_NL": (32, 18),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "Q1_0": (128, 18), "NVFP4": (64, 36),
}  # fmt: skip

# Other formats: bits per code, and per weight for the scales of its block. NF4 has an fp32 absmax per block of 64;
# double quantization (QLoRA, arXiv 2305.14314, section 3) has 8 bits, and an fp32 absmax per 256 blocks. MXFP8: an e8m0
# exponent per block of 32. The scales of FP8 and int8, one per tensor or per row, are not counted.
OTHERS = {
    "nf4": 4 + 32 / 64,
    "nf4-double": 4 + 8 / 64 + 32 / (64 * 256),
    "mxfp8": 8 + 8 / 32,
    "fp8": 8.0,
    "int8": 8.0,
}

# The file types of llama-quantize are mixes of kinds: most tensors get this one (llama_ftype_get_default_type).
MIXES = {
    **{kind: kind for kind in BLOCKS if kind not in ("Q3_K", "Q4_K", "Q5_K", "MXFP4", "NVFP4")},
    "Q2_K_S": "Q2_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K", "Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S",
    "MXFP4_MOE": "MXFP4",
}  # fmt: skip
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE", "FP16": "F16"}

# The other tensors of a mix: llama-quant.cpp, llama_tensor_get_type_impl, with an importance matrix for the IQ mixes,
# which nearly all published ones have. In which layers, and the kind there; the first that applies.
_LOW = {"attn_v": {"grouped": "Q4_K", "all": "Q2_K"}, "ffn_down": {"first eighth": "Q2_K"},
        "token_embd": {"all": "Q2_K"}}  # fmt: skip
_IQ1 = {**_LOW, "attn_output": {"all": "IQ2_XXS"}}
_IQ2 = {"attn_v": {"grouped": "Q4_K", "all": "IQ3_S"}, "ffn_down": {"first eighth": "IQ3_S"},
        "attn_output": {"all": "IQ3_S"}, "token_embd": {"all": "IQ3_S"}}  # fmt: skip
_TERNARY = {"token_embd": {"all": "Q4_K"}}
_MORE = {"attn_v": {"more bits": "Q6_K"}, "ffn_down": {"more bits": "Q6_K"}}
RULES: dict[str, dict[str, dict[str, str]]] = {
    "Q2_K": {"attn_v": {"grouped": "Q4_K", "all": "Q3_K"}, "ffn_down": {"all": "Q3_K"}, "attn_output": {"all": "Q3_K"}},
    "Q2_K_S": {"attn_v": {"grouped": "Q4_K"}, "ffn_down": {"first eighth": "Q4_K"}},
    "Q3_K_M": {"attn_v": {"first two": "Q5_K", "all": "Q4_K"}, "ffn_down": {"first sixteenth": "Q5_K", "all": "Q4_K"},
               "attn_output": {"all": "Q4_K"}},
    "Q3_K_L": {"attn_v": {"all": "Q5_K"}, "ffn_down": {"all": "Q5_K"}, "attn_output": {"all": "Q5_K"}},
    "Q4_K_S": {"attn_v": {"first four": "Q5_K"}, "ffn_down": {"first eighth": "Q5_K"}},
    "Q4_K_M": _MORE, "Q5_K_M": _MORE,
    "IQ4_NL": {"attn_v": {"grouped": "Q5_K"}}, "IQ4_XS": {"attn_v": {"grouped": "Q5_K"}},
    "IQ3_M": {"attn_v": {"all": "Q4_K"}, "ffn_down": {"first eighth": "Q4_K"}, "attn_output": {"all": "Q4_K"}},
    "IQ3_S": {"attn_v": {"grouped": "Q4_K"}},
    "IQ3_XS": {"attn_v": {"grouped": "Q4_K"}, "attn_q": {"all": "IQ3_XXS"}, "attn_k": {"all": "IQ3_XXS"},
               "ffn_gate": {"middle": "IQ3_XXS"}, "ffn_up": {"middle": "IQ3_XXS"}},
    "IQ3_XXS": {"attn_v": {"grouped": "Q4_K"}, "attn_q": {"all": "IQ2_S"}, "attn_k": {"all": "IQ2_S"},
                "attn_output": {"all": "IQ3_S"}, "token_embd": {"all": "IQ3_S"}},
    "IQ2_S": _IQ2, "IQ2_M": _IQ2, "IQ2_XS": _LOW, "IQ2_XXS": _LOW, "IQ1_M": _IQ1, "IQ1_S": _IQ1,
    "TQ1_0": _TERNARY, "TQ2_0": _TERNARY,
}  # fmt: skip

# The kind to use instead if a row is not a whole number of superblocks: llama-quant.cpp, tensor_type_fallback.
SMALLER_BLOCKS = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0",
    **{kind: "IQ4_NL" for kind in BLOCKS if kind.startswith("IQ") and kind != "IQ4_NL"},
}  # fmt: skip

# GGUF's names of the linear layers; GPT-2's c_proj is attn_output in its attention
NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "c_attn": "attn_qkv",
    "qkv_proj": "attn_qkv", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "gate_up_proj": "ffn_up", "c_fc": "ffn_up",
    "down_proj": "ffn_down", "c_proj": "ffn_down", "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
}  # fmt: skip

ALIGNMENT = 32  # bytes: every tensor of a .gguf file starts at a multiple of it (general.alignment's default)
# Bytes of the file's header per entry of the vocabulary: the tokens' texts, types and merges. Computed from one
# published file, Llama-3.1-8B-Instruct-f32.gguf: (32 128 885 888 - its tensors) / 128 256, checked 2026-11. With fewer
# merges it is smaller; at 8B parameters the whole header is 0.1 % of a Q8_0 file.
HEADER_PER_TOKEN = 61.1


@dataclass(frozen=True)
class Stored:
    """One tensor of a .gguf file: its GGUF name, the kind it is stored in, its rows and columns."""

    name: str
    kind: str
    rows: int
    columns: int

    @property
    def layer(self) -> int | None:
        """The number of its layer; None for a tensor outside the layers."""
        return int(self.name.split(".")[1]) if self.name.startswith("blk.") else None

    @property
    def bytes(self) -> int:
        """Its bytes in the file, padded to the alignment."""
        weights, size = BLOCKS[self.kind]
        return -(-self.rows * (self.columns // weights * size) // ALIGNMENT) * ALIGNMENT


def bits_per_weight(kind: str) -> float:
    """Return the bits per weight of `kind`, scales included: a GGUF kind, or one of nf4, nf4-double, mxfp8, …"""
    if kind in BLOCKS:
        weights, size = BLOCKS[kind]
        return 8 * size / weights
    if kind in OTHERS:
        return OTHERS[kind]
    raise unknown_name("format", str(kind), [*BLOCKS, *OTHERS], f"It is one of {', '.join([*BLOCKS, *OTHERS])}.")


def mix_named(text: str) -> str:
    """Return the file type that `text` names, with llama-quantize's aliases; raises UnknownName with the nearest."""
    mix = ALIASES.get(str(text).upper(), str(text).upper())
    if mix not in MIXES:
        raise unknown_name("GGUF type", str(text), list(MIXES), f"It is one of {', '.join(MIXES)}.")
    return mix


def file_bytes(spec: ModelSpec, mix: str, header: int | None = None) -> int:
    """Return the bytes of `spec` as a .gguf file of `mix` ("Q4_K_M", "Q8_0", …); `header` are those before the tensors.

    If `header` is None, it is estimated from the vocabulary. Raises UnknownName for an unknown mix, SpecError for a
    model whose tensors are not described here (a recurrence, a part that is no transformer).
    """
    if header is None:
        header = round(HEADER_PER_TOKEN * spec.vocab)
    return header + sum(tensor.bytes for tensor in stored(spec, mix))


@lru_cache(maxsize=256)
def stored(spec: ModelSpec, mix: str) -> tuple[Stored, ...]:
    """Return the tensors of a model, without vision or audio, with the kinds that `llama-quantize` gives them.

    Vectors, routers and learned positions stay F32.
    """
    mix = mix_named(mix)
    tensors = []
    for name in ("output",) if spec.tied else ("output", "token_embd"):
        tensors.append(_stored(spec, mix, name, None, spec.vocab, spec.hidden))
    for name, layer, rows, columns in _matrices(spec):
        tensors.append(_stored(spec, mix, name, layer, rows, columns))
    parts = spec.parameters_by_component
    other = parts.get("rest", 0)
    if "towers" in parts:  # vision and audio are a file of their own
        other += parts["towers"]
    elif other > 0.002 * spec.parameters:
        raise SpecError(f"{spec.name} has {other:,} parameters in other layers than attention, MLPs and experts; how "
                        "llama.cpp stores them is not known here. Give a model without them")  # fmt: skip
    else:
        other = 0
    remaining = spec.parameters - other - sum(tensor.rows * tensor.columns for tensor in tensors)
    tensors.append(Stored("norms, biases, routers and positions", "F32", 1, remaining))
    if spec.family == "llama" and spec.config.get("rope_scaling"):
        tensors.append(Stored("rope_freqs", "F32", 1, spec.head_dim // 2))  # Llama 3.1's long-context factors
    return tuple(tensors)


def _stored(spec: ModelSpec, mix: str, name: str, layer: int | None, rows: int, columns: int) -> Stored:
    called = name if layer is None else f"blk.{layer}.{name}"
    return Stored(called, fitting(_kind(spec, mix, name, layer or 0), columns), rows, columns)


def _matrices(spec: ModelSpec) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, layer, rows and columns of every matrix of the blocks; experts of a layer are one tensor."""
    for linear in spec.block_linears:
        shared = spec.experts and linear.part == "mlp" and spec.shared_experts * spec.moe_intermediate in (
            linear.inputs, linear.outputs)  # fmt: skip
        for layer in range(linear.count):
            if linear.name == "kv_b_proj" and spec.mla:  # keys and values of the latent, in two
                nope, value, rank = spec.mla.qk_nope_head_dim, spec.mla.v_head_dim, spec.mla.kv_lora_rank
                yield "attn_k_b", layer, spec.heads * rank, nope
                yield "attn_v_b", layer, spec.heads * value, rank
            else:
                output = (linear.name, linear.part) == ("c_proj", "attention")
                name = "attn_output" if output else NAMES[linear.name] + ("_shexp" if shared else "")
                yield name, layer + (spec.dense_layers if shared else 0), linear.outputs, linear.inputs
    if spec.experts:
        width, hidden = spec.moe_intermediate, spec.hidden
        for layer in range(spec.layers - spec.moe_layers, spec.layers):
            for name, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
                yield f"ffn_{name}_exps", layer, spec.experts * rows, columns


def fitting(kind: str, columns: int) -> str:
    """Return `kind`, or what llama.cpp stores instead if `columns` are not a whole number of its blocks."""
    while kind in BLOCKS and columns % BLOCKS[kind][0]:
        kind = SMALLER_BLOCKS.get(kind, "F16")
    return kind


def _kind(spec: ModelSpec, mix: str, name: str, layer: int) -> str:
    """The rules of llama-quant.cpp, which spend more bits on value projections, down projections and the head."""
    base = MIXES[mix]
    if base in ("F32", "F16", "BF16"):
        return base
    if mix == "MXFP4_MOE":
        return "MXFP4" if name.endswith("_exps") else "Q8_0"
    if name == "output":
        low = RULES.get(mix) in (_LOW, _IQ1, _IQ2) or mix == "IQ3_XXS"
        return "Q8_0" if base == "Q8_0" or spec.hidden % BLOCKS[base][0] else "Q5_K" if low else "Q6_K"
    name = {"attn_qkv": "attn_v"}.get(name, name.removesuffix("_exps").removesuffix("_shexp"))
    kind = next((kind for place, kind in RULES.get(mix, {}).get(name, {}).items() if _in(place, spec, layer)), base)
    # llama.cpp's rule for "70B", 80 layers: eight query heads share each value head
    if name == "attn_v" and spec.layers == 80 and spec.heads == 8 * spec.kv_heads and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return _mixtral(mix, name, kind) if spec.experts == 8 else kind


def _mixtral(mix: str, name: str, kind: str) -> str:
    """The rules of llama-quant.cpp for eight experts, whose attention is small."""
    low = RULES.get(mix) in (_LOW, _IQ1, _IQ2)
    if name == "attn_output" and mix not in ("Q2_K_S", "Q3_K_L", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0"):
        return "Q5_K" if "K" in mix or mix.startswith("IQ") else kind
    if name == "attn_k" and low:
        return "Q4_K"
    return "Q8_0" if name in ("attn_k", "attn_v") and not low else kind


def _in(place: str, spec: ModelSpec, layer: int) -> bool:
    """Return whether a layer is in `place`; "grouped" is true in all layers of models with shared value heads."""
    count = spec.layers
    first, last = count // 8, 7 * count // 8
    return {
        "all": True,
        "grouped": spec.heads >= 4 * spec.kv_heads,
        "first two": layer < 2,
        "first four": layer < 4,
        "first sixteenth": layer < count // 16,
        "first eighth": layer < first,
        "middle": first <= layer < last,
        "more bits": layer < first or layer >= last or (layer - first) % 3 == 2,
    }[place]
