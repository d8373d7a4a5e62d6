"""Write llmlab/specs/families.json: every language model that transformers has a class for, by model_type.

    .venv/bin/python tools/families.py

An entry has the auto class and the class that it makes, the names that this family's config uses for transformers'
usual ones, the sizes that a config may leave out, whether its MLPs are gated and its positions rotary, and the model
types of nested configs. With it a config.json is read without transformers.
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import modeling_auto

import llmlab as lab
from llmlab.specs import generic

PATH = Path(generic.__file__).with_name("families.json")
# In this order: BERT can also be a decoder, and a model that sees images can write without one.
CLASSES = {
    "AutoModelForSpeechSeq2Seq": "SPEECH_SEQ_2_SEQ",
    "AutoModelForSeq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "AutoModelForMaskedLM": "MASKED_LM",
    "AutoModelForImageTextToText": "IMAGE_TEXT_TO_TEXT",
    "AutoModelForCausalLM": "CAUSAL_LM",
}
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings", "tie_word_embeddings", "hidden_act", "hidden_activation",
    "activation_function", "feed_forward_proj", "encoder_layers", "decoder_layers", "num_layers", "num_encoder_layers",
    "num_decoder_layers", "d_ff", "ffn_dim", "encoder_ffn_dim", "d_kv", "num_experts", "num_local_experts",
    "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k",
    "moe_intermediate_size", "expert_ffn_hidden_size", "n_shared_experts", "num_shared_experts",
    "shared_expert_intermediate_size", "shared_intermediate_size", "first_k_dense_replace", "sliding_window", "depth",
    "embed_dim", "num_heads", "mlp_ratio", "mlp_dim",
)  # fmt: skip


def families() -> dict[str, Any]:
    """Return the entries by model_type, all but whether they are gated."""
    known = {name: getattr(modeling_auto, f"MODEL_FOR_{key}_MAPPING_NAMES") for name, key in CLASSES.items()}
    found: dict[str, Any] = {}
    wanted = sorted(set().union(*known.values()))
    while wanted:
        kind = wanted.pop(0)
        if kind in found:
            continue
        try:
            config = transformers.AutoConfig.for_model(kind)
        except (ValueError, StrictDataclassError):  # no default of this family is valid
            continue
        data = config.to_dict()
        names = {usual: own for usual, own in config.attribute_map.items() if usual in SIZES}
        own = {*SIZES, *names.values()}
        sizes = {key: value for key, value in data.items() if key in own and isinstance(value, (int, float, str))}
        if "num_hidden_layers" not in data and isinstance(getattr(config, "num_hidden_layers", None), int):
            sizes.setdefault(names.get("num_hidden_layers", "num_hidden_layers"), config.num_hidden_layers)
        nested = {key: value["model_type"] for key, value in data.items()
                  if isinstance(value, dict) and value.get("model_type")}  # fmt: skip
        wanted += nested.values()
        auto = next((name for name, kinds in known.items() if kind in kinds), None)
        owner = known[auto][kind] if auto else None
        owner = owner if isinstance(owner, str) or owner is None else owner[0]
        entry = {"class": auto, "architecture": owner, "attention": attentions(owner) if owner else None,
                 "names": names, "sizes": sizes, "nested": nested,
                 "rotary": any(name in data for name in ("rope_parameters", "rope_theta"))}  # fmt: skip
        found[kind] = {key: value for key, value in entry.items() if value}
    return dict(sorted(found.items()))


def attentions(name: str) -> list[str]:
    """Return the attention implementations that the class called `name` takes, as `Training.attention` names them."""
    owner = getattr(transformers, name)
    flags = {"sdpa": "_supports_sdpa", "flash": "_supports_flash_attn"}
    return ["eager", *(attention for attention, flag in flags.items() if getattr(owner, flag, False))]


def add_gates(table: dict[str, Any]) -> None:
    """Add whether MLPs have a gate: which of the two counts more nearly the parameters of the family's class."""
    for kind, entry in table.items():
        if "class" not in entry:
            continue
        try:
            config = transformers.AutoConfig.for_model(kind)
            with torch.device("meta"):
                model = getattr(transformers, entry["class"]).from_config(config)
            text = table[generic.text_config(config.to_dict())["model_type"]]
            if text is not entry and "class" in text:
                continue  # it says so itself
            real = sum(parameter.numel() for parameter in model.parameters())
            apart = {}
            for text["gated"] in (False, True):
                apart[text["gated"]] = abs(lab.model(config.to_dict()).parameters - real)
        except Exception as error:  # whatever a class raises for a default that nobody builds
            logging.getLogger(__name__).warning("%s: %s", kind, str(error).split("\n")[0][:100])
            continue
        text["gated"] = apart[True] <= apart[False]


def write(table: dict[str, Any]) -> None:
    """Write the table, a family per line."""
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in table.items())
    text = f'{{"transformers": "{transformers.__version__}", "families": {{\n{lines}\n}}}}\n'
    PATH.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    write(families())  # gates are found by what `lab.model` reads
    found = dict(generic.families())
    add_gates(found)
    write(found)
