"""Sizes of the formats: bits per weight, and the bytes of a model's .gguf file, tensor by tensor. No torch, no numpy.

>>> bits_per_weight("Q8_0"), bits_per_weight("Q4_K"), bits_per_weight("MXFP4")
(8.5, 4.5, 4.25)
>>> from llmlab.specs.model import model
>>> file_bytes(model("Llama-3.1-8B"), "Q4_K_M") / 1e9  # doctest: +ELLIPSIS
4.92...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....base.errors import SpecError, unknown_name

if TYPE_CHECKING:
    from ....specs.model import ModelSpec

# Weights and bytes per block: ggml/src/ggml-common.h, the block_* structs.
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "MXFP4": (32, 17),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
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

# The types of `llama-quantize` are mixes of kinds; most tensors get the kind in the mix's name.
MIXES = {
    mix: mix[:4] if "_K_" in mix else mix
    for mix in (
        "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L",
        "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K",
    )
}  # fmt: skip

# The kind to use instead if a row is not a whole number of superblocks: llama-quant.cpp, tensor_type_fallback.
SMALLER_BLOCKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}

# GGUF's names of the linear layers; GPT-2's c_proj is attn_output in its attention
NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "c_attn": "attn_qkv",
    "qkv_proj": "attn_qkv", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "gate_up_proj": "ffn_up", "c_fc": "ffn_up",
    "down_proj": "ffn_down", "c_proj": "ffn_down",
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


def file_bytes(spec: ModelSpec, mix: str, header: int | None = None) -> int:
    """Return the bytes of `spec` as a .gguf file of `mix` ("Q4_K_M", "Q8_0", …); `header` are those before the tensors.

    If `header` is None, it is estimated from the vocabulary. Raises UnknownName for an unknown mix, SpecError for a
    model that the rules here do not cover (mixtures of experts, latent attention).
    """
    if header is None:
        header = round(HEADER_PER_TOKEN * spec.vocab)
    return header + sum(tensor.bytes for tensor in stored(spec, mix))


def stored(spec: ModelSpec, mix: str) -> list[Stored]:
    """Return the tensors of a dense model with the kinds that `llama-quantize` gives them, without an imatrix.

    Source: llama.cpp src/llama-quant.cpp, llama_tensor_get_type_impl. Vectors and learned positions stay F32.
    """
    if mix not in MIXES:
        raise unknown_name("GGUF mix", str(mix), list(MIXES), f"It is one of {', '.join(MIXES)}.")
    if spec.experts or spec.mla:
        raise SpecError(f"{spec.name} has experts or latent attention; the rules here are those of dense models")
    tensors = []
    for name in ("output",) if spec.tied else ("output", "token_embd"):
        kind = fitting(_kind(spec, mix, name, 0), spec.hidden)
        tensors.append(Stored(name, kind, spec.vocab, spec.hidden))
    for linear in spec.linears:
        if linear.part != "head":
            name = "attn_output" if (linear.name, linear.part) == ("c_proj", "attention") else NAMES[linear.name]
            for i in range(linear.count):
                kind = fitting(_kind(spec, mix, name, i), linear.inputs)
                tensors.append(Stored(f"blk.{i}.{name}", kind, linear.outputs, linear.inputs))
    vectors = spec.parameters - sum(tensor.rows * tensor.columns for tensor in tensors)
    tensors.append(Stored("norms, biases and positions", "F32", 1, vectors))
    if spec.family == "llama" and spec.config.get("rope_scaling"):
        tensors.append(Stored("rope_freqs", "F32", 1, spec.head_dim // 2))  # Llama 3.1's long-context factors
    return tensors


def fitting(kind: str, columns: int) -> str:
    """Return `kind`, or what llama.cpp stores instead if `columns` are not a whole number of its blocks."""
    while kind in BLOCKS and columns % BLOCKS[kind][0]:
        kind = SMALLER_BLOCKS.get(kind, "F16")
    return kind


def _kind(spec: ModelSpec, mix: str, name: str, i: int) -> str:
    """llama-quant.cpp's rules: more bits where errors hurt most: value projections, down projections and head."""
    base, layers = MIXES[mix], spec.layers
    if base in ("F32", "F16", "BF16"):
        return base
    if name == "output":
        return "Q8_0" if base == "Q8_0" or spec.hidden % BLOCKS[base][0] else "Q6_K"
    if name == "attn_output":
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mix, base)
    value = name in ("attn_v", "attn_qkv")
    if not value and name != "ffn_down":
        return base
    more = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2  # its use_more_bits
    kind = {
        "Q2_K": "Q4_K" if value and spec.heads >= 4 * spec.kv_heads else "Q3_K",
        "Q3_K_M": "Q5_K" if i < (2 if value else layers // 16) else "Q4_K",
        "Q3_K_L": "Q5_K",
        "Q4_K_S": "Q5_K" if i < (4 if value else layers // 8) else base,
        "Q4_K_M": "Q6_K" if more else base,
        "Q5_K_M": "Q6_K" if more else base,
    }.get(mix, base)
    # llama.cpp's rule for "70B", a Llama of 80 layers: eight query heads share each value head
    wide = value and layers == 80 and spec.heads == 8 * spec.kv_heads
    return "Q5_K" if wide and kind in ("Q3_K", "Q4_K") else kind
