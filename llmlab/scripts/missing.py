"""Errors that name a resource a script needs and does not find: models, data sets, metrics, downloads, packages."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

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
LAZY = "Could not import module"  # transformers, about any error in a module of its own
ASKED = ("repo_id", "path_or_repo_id")  # the variables of these libraries that hold the name
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
VLLM = NotAvailable(
    "vLLM generates with kernels that are compiled for the GPU, which are not simulated. Let the script generate with "
    "the model itself (use_vllm=False in TRL's configs); a colocated vLLM takes its share of the GPU's memory, "
    "gpu_memory_utilization, on top of what this simulation shows"
)
# Packages whose kernels are compiled for a GPU, and what to use instead.
ATTENTION = "torch.nn.functional.scaled_dot_product_attention, which takes as much memory"
OPTIMIZERS, LAYERS = "an optimizer of torch.optim", "the layer written with PyTorch's operators"
COMPILED = {
    "adam_atan2": OPTIMIZERS, "apex": OPTIMIZERS, "flash_attn": ATTENTION, "flash_attn_interface": ATTENTION,
    "xformers": ATTENTION, "causal_conv1d": LAYERS, "mamba_ssm": LAYERS, "transformer_engine": LAYERS,
}  # fmt: skip
NO_FOLDER = re.compile(r"Repo id must .*?: '([^']+)'")  # of huggingface_hub, about a path


def refused(error: BaseException) -> NotAvailable | None:
    """Return the NotAvailable for an error that is caused by a missing resource; None for any other error."""
    while isinstance(error, ImportError) and str(error).startswith(LAZY) and error.__cause__ is not None:
        error = error.__cause__
    errors = list(chain(error))
    message = " ".join(str(error).split())
    if path := next((match[1] for e in errors if (match := NO_FOLDER.search(str(e)))), None):
        return NotAvailable(f"{path} is not a folder here; create it with the model's config.json and the files of its "
                            f"tokenizer, which are enough, or give another path{script_line(error)}")  # fmt: skip
    if any(type(e).__name__ in NOT_ON_HUB or any(words in str(e) for words in HUB_MESSAGES) for e in errors):
        name = next((name for name in _locals(errors, *ASKED) if isinstance(name, str)), "")
        named = "" if name in message else f"{name}: "
        return NotAvailable(f"{named}{message}; {GIVE}{script_line(error)}")
    if any(type(e).__name__ == "LocalTokenNotFoundError" for e in errors):
        return NotAvailable(f"{message}; llmlab run uses no account of the Hub. Leave out what needs one"
                            f"{script_line(error)}")  # fmt: skip
    if any(map(_is_network, errors)):
        address = _address(errors) or message
        file = address.partition("?")[0].lower()
        advice = [f". {words}" for suffixes, words in INSTEAD.items() if file.endswith(suffixes)]
        return NotAvailable(f"{address}: {FETCH}{''.join(advice)}{script_line(error)}")
    imports = [e for e in errors if isinstance(e, ImportError)]
    if any(str(e.name).partition(".")[0] == "unsloth" for e in imports):
        return UNSLOTH
    if any(re.search(r"\bvllm\b", f"{e.name} {e}", re.IGNORECASE) for e in imports):
        return NotAvailable(f"{VLLM}{script_line(error)}")
    words = {word for e in imports for word in re.findall(r"\w+", f"{e.name} {e}")}
    if compiled := next((name for name in COMPILED if name in words), None):
        why = "its kernels are compiled for a GPU and not simulated, so do not install it"
        instead = f"let the script use {COMPILED[compiled]}{script_line(error)}"
        return NotAvailable(f"{message.rstrip('.')}: {why}; {instead}")
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


def _frames(errors: list[BaseException]) -> list[FrameType]:
    return [frame for error in errors for frame, _ in traceback.walk_tb(error.__traceback__)]


def _locals(errors: list[BaseException], *names: str) -> Iterator[Any]:
    """Yield the variables of these names in the traceback."""
    return (frame.f_locals[name] for frame in _frames(errors) for name in names if name in frame.f_locals)


def _address(errors: list[BaseException]) -> str | None:
    """Return the requested URL, else the host, from the variables in the traceback, the innermost frame first."""
    texts = (value for frame in reversed(_frames(errors)) for value in frame.f_locals.values()
             if isinstance(value, str))  # fmt: skip
    hosts = (host for host in _locals(errors, "host") if isinstance(host, str))
    return next(filter(URL.fullmatch, texts), None) or next(hosts, None)


def script_line(error: BaseException) -> str:
    """Return the line of the user's script that led to the error, in parentheses; "" if there is none."""
    frames = [summary for cause in chain(error) for summary in traceback.extract_tb(cause.__traceback__)]
    for frame in reversed(frames):
        if not frame.filename.startswith(NOT_THE_USERS) and "-packages" not in frame.filename:
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
