"""Llama models as .gguf files that llama.cpp loads: hyperparameters, tokenizer, and tensors with GGUF's names.

Keys: gguf-py/gguf/constants.py. Two things differ from the weights of llmlab's Llama: RoPE in llama.cpp rotates
neighbouring channels (2i, 2i + 1), in Hugging Face (i, i + D/2), so the rows of q and k are permuted; and a tied head
is stored once, as the embedding.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ....base.errors import SpecError
from ....specs.gguf import MIXES, stored
from ....specs.model import ModelSpec
from . import gguf_file
from .gguf import package

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ...architectures.llama import Llama

# llama.cpp include/llama.h, llama_ftype: the number of a mix in `general.file_type`
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K_M": 15, "Q6_K": 18}
# llama.cpp's key, config.json's, and the attribute of ModelSpec
SIZES = (
    ("vocab_size", "vocab_size", "vocab"),
    ("context_length", "max_position_embeddings", "max_positions"),
    ("embedding_length", "hidden_size", "hidden"),
    ("block_count", "num_hidden_layers", "layers"),
    ("feed_forward_length", "intermediate_size", "intermediate"),
    ("attention.head_count", "num_attention_heads", "heads"),
    ("attention.head_count_kv", "num_key_value_heads", "kv_heads"),
)
NORMAL, CONTROL, UNUSED = 1, 3, 5  # types of tokens, llama_token_type


def write_llama(path: str | os.PathLike, model: Llama, tokenizer: Tokenizer, mix: str = "Q8_0") -> None:
    """Write `model` with its byte-level BPE `tokenizer`, each tensor in the kind that `llama-quantize` uses in `mix`.

    Raises SpecError, and writes no file, for a mix with kinds that are not encoded here (Q5_K, Q3_K, Q2_K), a model
    with scaled RoPE, and a tokenizer larger than the vocabulary. The model is not changed.
    """
    spec = model.spec
    if mix not in FILE_TYPES:
        raise SpecError(f"mix={mix!r} is not written here; give one of {', '.join(FILE_TYPES)}")
    if model.rope["rope_type"] != "default":
        raise SpecError(f"{spec.name} scales its RoPE ({model.rope['rope_type']}); only plain RoPE is written here")
    kinds = {f"{tensor.name}.weight": tensor.kind for tensor in stored(spec, mix)}
    kinds.setdefault("token_embd.weight", kinds["output.weight"])  # a tied head
    names, tensors = gguf_names(model), {}
    for name, parameter in model.state_dict().items():
        weight, heads = parameter.cpu().float().numpy(), heads_of(name, spec)
        tensors[names[name]] = to_neighbours(weight, heads) if heads else weight
    metadata = {**hyperparameters(spec, mix), **vocabulary(tokenizer, spec.vocab)}
    gguf_file.write(path, tensors, kinds, "llama", metadata)


def read_llama(path: str | os.PathLike) -> Llama:
    """Return the Llama of a .gguf file, its weights decoded to float32, in eval mode.

    Raises SpecError for a truncated or corrupt file, another architecture, and missing tensors.
    """
    import torch

    from ...architectures.llama import Llama

    file = gguf_file.read(path)
    if file.metadata.get("general.architecture") != "llama":
        raise SpecError(f"{path} has a {file.metadata.get('general.architecture')!r} model; only llama can be read")
    try:
        model = Llama.from_spec(_config(file))
    except KeyError as missing:
        raise SpecError(f"{path} lacks {missing}; it is not a whole model") from None
    state = {}
    for name, theirs in gguf_names(model).items():
        if theirs not in file.tensors:
            raise SpecError(f"{path} lacks tensor {theirs!r}; it is not a whole model")
        weight, heads = file.tensors[theirs].decode(), heads_of(name, model.spec)
        state[name] = torch.from_numpy(to_halves(weight, heads) if heads else weight)
    model.load_state_dict(state)
    return model.eval()


def gguf_names(model: Llama) -> dict[str, str]:
    """Return GGUF's name of each tensor of `model`: layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight."""
    names = package.get_tensor_name_map(package.MODEL_ARCH.LLAMA, model.spec.layers)
    stems = [name.removesuffix(".weight") for name in model.state_dict()]  # transformers' names, without "model."
    theirs = {f"{stem}.weight": names[stem if stem == "lm_head" else f"model.{stem}"] + ".weight" for stem in stems}
    if model.spec.tied:
        theirs["lm_head.weight"] = theirs["embed_tokens.weight"]
    return theirs


def heads_of(name: str, spec: ModelSpec) -> int:
    """Return the number of heads in the rows of a tensor that RoPE rotates (q and k), 0 for any other tensor."""
    return spec.heads if "q_proj" in name else spec.kv_heads if "k_proj" in name else 0


def to_neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute the rows (heads · D, I) so that in each head channel i + D/2 follows channel i."""
    split = weight.reshape(heads, 2, -1, weight.shape[1])  # (H, half, D/2, I)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the inverse permutation of `to_neighbours`."""
    split = weight.reshape(heads, -1, 2, weight.shape[1])  # (H, D/2, half, I)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(weight.shape)


def hyperparameters(spec: ModelSpec, mix: str) -> dict[str, Any]:
    """Return the metadata that llama.cpp needs for a model of architecture "llama"."""
    metadata = {
        "general.name": spec.name,
        "general.file_type": FILE_TYPES[mix],
        **{f"llama.{key}": getattr(spec, attribute) for key, _, attribute in SIZES},
        "llama.attention.layer_norm_rms_epsilon": float(spec.config.get("rms_norm_eps", 1e-6)),
        "llama.rope.dimension_count": spec.head_dim,
        "llama.rope.freq_base": float(spec.config.get("rope_theta") or 10000.0),
    }
    if MIXES[mix] not in ("F32", "F16"):
        metadata["general.quantization_version"] = 2  # GGML_QNT_VERSION
    return metadata


def vocabulary(tokenizer: Tokenizer, vocab: int) -> dict[str, Any]:
    """Return the tokens, their types and the merges of a byte-level BPE tokenizer, padded to `vocab` entries.

    "gpt-2" is llama.cpp's name for the rule that splits text before merging, the one of tokenizers' ByteLevel.
    """
    described = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    special = {token["id"] for token in described["added_tokens"] if token["special"]}
    if described["model"]["type"] != "BPE" or max(ids.values()) >= vocab or not special:
        raise SpecError(
            f"a tokenizer of {max(ids.values()) + 1} {described['model']['type']} entries for a model of {vocab}; give "
            "the byte-level BPE tokenizer the model was trained with, with an end-of-text token"
        )
    tokens, types = [f"[unused {i}]" for i in range(vocab)], [UNUSED] * vocab
    for token, i in ids.items():
        tokens[i], types[i] = token, CONTROL if i in special else NORMAL
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": min(special),
        "tokenizer.ggml.eos_token_id": min(special),
        "tokenizer.ggml.add_bos_token": False,
    }


def _config(file: gguf_file.File) -> dict[str, Any]:
    """Return the config.json for a file's metadata; floats are rounded to 6 digits, as they were stored in 32 bits."""
    llama = {key.removeprefix("llama."): value for key, value in file.metadata.items() if key.startswith("llama.")}
    return {
        "model_type": "llama",
        **{ours: llama[key] for key, ours, _ in SIZES},
        "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(f"{llama['rope.freq_base']:.6g}"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
