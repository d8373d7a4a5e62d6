"""A small trained Llama in the package: 2.5 million parameters, trained for minutes on Python's documentation.

    python -m llmlab.course.techniques.training_loop --small --out FOLDER

trains it again, and `small_model(FOLDER)` reads the result. A model's perplexity means something only with its own
tokenizer and on a text that it has not seen: both are in the package too.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...base.errors import NotAvailable, SpecError
from ...data import PYTHON_DOCS_FILE
from .llama import Llama

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FOLDER = Path(__file__).with_name("small_llama")
TEXT = PYTHON_DOCS_FILE
HELD_OUT = 0.1  # the share at the end of the text, as in `llmlab.data.split`
WINDOW, STRIDE = 256, 128  # tokens: those of the perplexity in recipe.json
SAMPLE = slice(4096, 6144)  # of the held-out tokens: quick to read, and about as hard as all of them
WEIGHTS, CONFIG, TOKENIZER, RECIPE = "model.safetensors", "config.json", "tokenizer.json", "recipe.json"
AGAIN = "reinstall llmlab, or train it again: python -m llmlab.course.techniques.training_loop --small --out FOLDER"


def small_model(folder: str | Path = FOLDER, attention: str = "sdpa") -> Llama:
    """Return the trained model in fp32, on the CPU, in eval mode; a new object for each call.

    Raises NotAvailable if a file is missing, SpecError if one is truncated or does not have recipe.json's checksum.
    """
    from safetensors.torch import load_file

    weights = load_file(_checked(folder, WEIGHTS))
    model = Llama.from_spec(json.loads(_checked(folder, CONFIG).read_text(encoding="utf-8")), attention)
    state = {name.removeprefix("model."): weight.float() for name, weight in weights.items()}
    state["lm_head.weight"] = state["embed_tokens.weight"]  # tied, so the file has it once
    model.load_state_dict(state)
    return model.eval()


def small_tokenizer(folder: str | Path = FOLDER) -> Tokenizer:
    """Return the model's own tokenizer, made by `llmlab.data.tokenizer(1024, TEXT)`. Raises as `small_model` does."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(_checked(folder, TOKENIZER)))


def small_ids() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids of the training text and of the held-out text, int64, (tokens,); equal on any Python."""
    ids = torch.tensor(_ids())
    held_out = round(len(ids) * HELD_OUT)
    return ids[:-held_out], ids[-held_out:]


def small_sample() -> torch.Tensor:
    """Return the held-out tokens, int64, (2048,), on which all chapters take the model's perplexity.

    With WINDOW and STRIDE it is within 3 % of that of the whole held-out text; pieces of this size have 20 to 51.
    """
    return small_ids()[1][SAMPLE]


@lru_cache(maxsize=1)
def _ids() -> tuple[int, ...]:
    return tuple(small_tokenizer().encode(_checked(FOLDER, TEXT.name).read_bytes().decode("utf-8")).ids)


def stated(folder: str | Path = FOLDER) -> dict[str, Any]:
    """Return recipe.json: the `recipe`, the `perplexity` of the held-out text, the `sha256` of each file, and more."""
    path = Path(folder) / RECIPE
    if not path.is_file():
        raise NotAvailable(f"{path.name} of the small model is not in {path.parent}; {AGAIN}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecError(f"{path.name} in {path.parent} is not JSON: {error}; {AGAIN}") from None


def sha256(path: Path) -> str:
    """Return the checksum of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _checked(folder: str | Path, name: str) -> Path:
    path, expected = Path(folder) / name, stated(folder)["sha256"].get(name)
    if not path.is_file():
        raise NotAvailable(f"{name} of the small model is not in {path.parent}; {AGAIN}")
    if (actual := sha256(path)) != expected:
        raise SpecError(
            f"{name} in {path.parent} has {path.stat().st_size:,} bytes and checksum {actual[:12]}…, {RECIPE} says "
            f"{str(expected)[:12]}…: it is truncated, or of another model; {AGAIN}"
        )
    return path
