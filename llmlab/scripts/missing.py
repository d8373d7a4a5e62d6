"""Errors that name a resource a script needs and does not find: models, data sets, metrics, downloads, packages."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from ..base.errors import NotAvailable

NOT_THE_USERS = (str(Path(__file__).parents[1]), sys.base_prefix, "<frozen")
# Errors of huggingface_hub and datasets, by name, so that neither has to be imported.
NOT_ON_HUB = (
    "LocalEntryNotFoundError", "OfflineModeIsEnabled", "RepositoryNotFoundError", "DatasetNotFoundError",
    "EntryNotFoundError",
)  # fmt: skip
# Messages of the libraries for errors without their own type.
HUB_MESSAGES = (
    "Can't load tokenizer for", "Couldn't instantiate the backend tokenizer", "Couldn't find cache for",
    "Couldn't find a module script", "on the Hub (",
)  # fmt: skip
NETWORK_LIBRARIES = ("socket", "urllib", "requests", "urllib3", "httpx", "httpcore", "aiohttp", "ssl")
NETWORK = (
    "gaierror", "URLError", "ConnectionError", "ConnectError", "ConnectTimeout", "ConnectTimeoutError", "MaxRetryError",
    "NameResolutionError", "NewConnectionError", "ProxyError", "ReadTimeout", "ClientConnectorError",
    "ClientConnectorDNSError", "SSLError",
)  # fmt: skip
NO_ANSWER = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)
# Messages of libraries that drop the original error: torchvision's MNIST, torch.hub.
NETWORK_MESSAGES = ("<urlopen error", "no internet connection")
URL = re.compile(r"(https?|ftp)://\S+")
GIVE = (
    "llmlab run downloads nothing. Download it into Hugging Face's cache (`hf download NAME`; for a model config.json "
    "and the tokenizer's files are enough), give the script a local folder, or give --config NAME=config.json for a "
    "model and --data NAME=rows.jsonl for a data set"
)
FETCH = "the network did not answer. Put the file where the script looks for downloads, or give the script a local file"
# Further advice by the ending of the address: for files of weights, and of data.
INSTEAD = {
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar", ".gguf"): "Random weights take as much memory, so the "
    "script can also build the model without pretrained ones",
    (".txt", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow"): "Rows of your own in the same format will do",
}
UNSLOTH = NotAvailable(
    "unsloth replaces PyTorch's operators with kernels that are compiled for the GPU, which is not simulated. Load the "
    "model with transformers and peft in the script, or ask lab.estimate, which describes quantized weights with "
    "double_quant=True and half_layers='all'"
)


def refused(error: BaseException) -> NotAvailable | None:
    """Return the NotAvailable for an error that is caused by a missing resource; None for any other error."""
    errors = list(chain(error))
    message = " ".join(str(error).split())
    if any(type(e).__name__ in NOT_ON_HUB or any(words in str(e) for words in HUB_MESSAGES) for e in errors):
        return NotAvailable(f"{message}; {GIVE}{script_line(error)}")
    if any(map(_is_network, errors)):
        address = _address(errors) or message
        file = address.partition("?")[0].lower()
        advice = [f". {words}" for suffixes, words in INSTEAD.items() if file.endswith(suffixes)]
        return NotAvailable(f"{address}: {FETCH}{''.join(advice)}{script_line(error)}")
    imports = [e for e in errors if isinstance(e, ImportError)]
    if any(str(e.name).partition(".")[0] == "unsloth" for e in imports):
        return UNSLOTH
    if any(isinstance(e, ModuleNotFoundError) or "install" in str(e) for e in imports):
        return NotAvailable(f"{message.rstrip('.')}: install that package beside llmlab, or leave it out of the "
                            f"script{script_line(error)}")  # fmt: skip
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and then the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_network(error: BaseException) -> bool:
    kind = type(error)
    if kind.__module__.split(".")[0] in NETWORK_LIBRARIES and kind.__name__ in NETWORK:
        return True
    return getattr(error, "errno", None) in NO_ANSWER or any(words in str(error) for words in NETWORK_MESSAGES)


def _address(errors: list[BaseException]) -> str | None:
    """Return the requested URL, else the host, from the variables in the traceback, the innermost frame first."""
    frames = [frame for error in errors for frame, _ in traceback.walk_tb(error.__traceback__)]
    texts = (value for frame in reversed(frames) for value in frame.f_locals.values() if isinstance(value, str))
    hosts = (frame.f_locals["host"] for frame in frames if isinstance(frame.f_locals.get("host"), str))
    return next(filter(URL.fullmatch, texts), None) or next(hosts, None)


def script_line(error: BaseException) -> str:
    """Return the line of the user's script that led to the error, in parentheses; "" if there is none."""
    frames = [summary for cause in chain(error) for summary in traceback.extract_tb(cause.__traceback__)]
    for frame in reversed(frames):
        if not frame.filename.startswith(NOT_THE_USERS) and "-packages" not in frame.filename:
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
