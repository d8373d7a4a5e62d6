"""Real text without a download: a corpus, a byte-pair tokenizer trained on it, and batches of token ids.

A `source` is one of
    "python-docs"                     CPython 3.11.7's documentation (pydoc_data.topics), kept in the package
    "notes.txt" or a Path             your own UTF-8 text file
    "hf:roneneldan/TinyStories"       a Hugging Face dataset: its train split, streamed, the first `HF_CHARACTERS`
    "hf:roneneldan/TinyStories:train[:5%]"    the split, or the slice of it, that you name, whole
Only "hf:..." reaches for the network. A dataset's rows are joined by `END_OF_TEXT`, one token.

    >>> "list comprehension" in corpus("python-docs")
    True
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base.errors import LabWarning, NotAvailable, SpecError, UnknownName, check_counts
from .base.files import write_whole

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

PYTHON_DOCS = "python-docs"
# A copy, because each Python has another edition, and with another text every loss on a page would differ. Its licence
# is beside it.
PYTHON_DOCS_FILE = Path(__file__).parent / "course" / "architectures" / "small_llama" / "python-docs.txt"
END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB = 257  # the 256 bytes, so that any text can be written, and END_OF_TEXT
MAX_VOCAB = 8192  # as many as half a megabyte of text can fill; a model with a larger vocabulary gets ids below this
HF_CHARACTERS = 20_000_000  # read from a dataset that is streamed, which is one without a named split
RECIPE = 1  # part of the cache key: raise it when _train changes

_SOURCES = "give 'python-docs', the path of a UTF-8 text file, or 'hf:OWNER/NAME[:SPLIT]' for a Hugging Face dataset"


# ---- text


def corpus(source: str | Path = PYTHON_DOCS) -> str:
    """Return the text of `source` unchanged: nothing is dropped or normalised, and every call returns the same.

    Raises UnknownName for a missing file, SpecError for one that is empty or not UTF-8, and NotAvailable for a source
    that needs something this machine lacks.
    """
    source = str(source)
    if source == PYTHON_DOCS:
        text = _file(PYTHON_DOCS_FILE)
    elif source.startswith("hf:"):
        text = _hugging_face(source)
    else:
        text = _file(Path(source))
    if not text.strip():
        raise SpecError(f"source {source!r} holds no text; {_SOURCES}")
    return text


def _file(path: Path) -> str:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise UnknownName(f"text file {str(path)!r} {what}; {_SOURCES}")
    try:
        return path.read_bytes().decode("utf-8")  # not read_text(): that would turn \r\n into \n
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise SpecError(f"text file {str(path)!r} is not UTF-8: {where}; convert it") from None
    except OSError as error:
        raise NotAvailable(f"text file {str(path)!r} cannot be read: {error.strerror}") from None


@lru_cache(maxsize=2)
def _hugging_face(source: str) -> str:
    name, _, split = source.removeprefix("hf:").partition(":")
    if not name:
        raise SpecError(f"source {source!r} names no dataset; {_SOURCES}")
    try:
        from datasets import load_dataset
    except ImportError:
        raise NotAvailable(f"source {source!r} needs the datasets library: pip install datasets") from None
    try:
        return _joined(source, load_dataset(name, split=split or "train", streaming=not split), whole=bool(split))
    except SpecError:
        raise
    except Exception as error:  # datasets raises dozens of kinds, also while it streams: no such name, no network
        why = (str(error).splitlines() or [""])[0]
        raise NotAvailable(f"source {source!r} could not be loaded: {type(error).__name__}: {why}") from error


def _joined(source: str, rows: Iterable[dict[str, Any]], whole: bool) -> str:
    texts, length = [], 0
    for row in rows:
        if not isinstance(row.get("text"), str):
            raise SpecError(f"{source!r} has no column 'text'; it has {', '.join(row)}; save the text to a file")
        texts.append(row["text"])
        length += len(row["text"])
        if not whole and length >= HF_CHARACTERS:
            warnings.warn(
                f"{source}: read up to {HF_CHARACTERS:,} characters ({len(texts):,} rows); "
                f"name a slice, such as {source}:train[:5%], for another part",
                LabWarning,
                stacklevel=4,
            )
            break
    return END_OF_TEXT.join(texts)


# ---- tokens


def tokenizer(vocab: int = MAX_VOCAB, source: str | Path = PYTHON_DOCS) -> Tokenizer:
    """Return a byte-level BPE tokenizer (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2) trained on `source`.

    It has at most `vocab` entries (a short text has fewer pairs to merge) and encodes any text without loss. It is
    trained once, then read from the cache folder: LLMLAB_CACHE, or the user's cache folder. Raises SpecError for a
    `vocab` below 257 and NotAvailable without the tokenizers library.
    """
    _check_vocab(vocab)
    return _tokenizer(vocab, corpus(source))


def tokens(vocab: int = MAX_VOCAB, source: str | Path = PYTHON_DOCS) -> torch.Tensor:
    """Return the whole text as token ids below `vocab`, int64 on the CPU, (tokens,); the tokenizer has at most 8192."""
    import torch

    _check_vocab(vocab)
    return torch.tensor(_encode(min(vocab, MAX_VOCAB), corpus(source)))


def split(
    vocab: int = MAX_VOCAB, source: str | Path = PYTHON_DOCS, validation: float = 0.1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (train, validation) token ids: the last part of the text, a share of `validation`, is held out.

    It is one piece, so that no held-out window overlaps a training window. The tokenizer is trained on all of the text.
    """
    if not 0 < validation < 1:
        raise SpecError(f"validation={validation!r} is outside 0 < validation < 1")
    ids = tokens(vocab, source)
    held_out = max(1, round(len(ids) * validation))
    if held_out >= len(ids):
        raise SpecError(f"source {str(source)!r} has {len(ids)} tokens, too few to hold some out; give a longer text")
    return ids[:-held_out], ids[-held_out:]


def windows(ids: torch.Tensor, micro_batch: int, seq_len: int, seed: int = 0) -> torch.Tensor:
    """Return `micro_batch` windows of `seq_len` consecutive tokens at random places, shape (micro_batch, seq_len).

    The same `seed` gives the same windows: they have a generator of their own and leave torch's global one alone.
    """
    import torch

    check_counts(micro_batch=micro_batch, seq_len=seq_len)
    if len(ids) < seq_len:
        what = f"seq_len={seq_len} is longer than the text, {len(ids)} tokens"
        raise SpecError(f"{what}; give a longer source or seq_len <= {len(ids)}")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - seq_len + 1, (micro_batch, 1), generator=generator)  # (B, 1)
    return ids[starts + torch.arange(seq_len)]  # (B, T)


def batch(vocab: int, micro_batch: int, seq_len: int, seed: int = 0, source: str | Path = PYTHON_DOCS) -> torch.Tensor:
    """Return one batch of real text as ids below `vocab`, int64 on the CPU, shape (micro_batch, seq_len)."""
    return windows(tokens(vocab, source), micro_batch, seq_len, seed)


# ---- the tokenizer and its cache


def _check_vocab(vocab: int) -> None:
    if isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < MIN_VOCAB:
        raise SpecError(f"vocab={vocab!r} is not a whole number >= {MIN_VOCAB} (256 bytes and {END_OF_TEXT})")


def _cache_file(vocab: int, text: str) -> Path:
    import tokenizers
    from platformdirs import user_cache_dir

    folder = Path(os.environ.get("LLMLAB_CACHE") or user_cache_dir("llmlab"))
    what = f"{RECIPE}\n{tokenizers.__version__}\n{vocab}\n".encode() + text.encode()
    return folder / f"tokenizer-{vocab}-{hashlib.sha256(what).hexdigest()[:16]}.json"


@lru_cache(maxsize=8)
def _encode(vocab: int, text: str) -> tuple[int, ...]:
    return tuple(_tokenizer(vocab, text).encode(text).ids)


@lru_cache(maxsize=8)
def _tokenizer(vocab: int, text: str) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise NotAvailable("training a tokenizer needs the tokenizers library: pip install tokenizers") from None
    path = _cache_file(vocab, text)
    if path.is_file():
        try:
            return Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises a bare Exception for a file it cannot read
            warnings.warn(f"cached tokenizer {path.name} is corrupt ({error}); trained again", LabWarning, stacklevel=3)
    trained = _train(vocab, text)
    try:
        write_whole(path, trained.to_str())
    except OSError as error:
        warnings.warn(f"tokenizer not cached: {error}; set LLMLAB_CACHE to a folder that can be written", LabWarning,
                      stacklevel=3)  # fmt: skip
    return trained


def _train(vocab: int, text: str) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(text.splitlines(keepends=True), trainer)
    return trained
