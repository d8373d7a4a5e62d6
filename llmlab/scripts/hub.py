"""Models that a script loads by name: if only a config is available, a checkpoint without values replaces the weights.

A config comes from the Hugging Face cache, from llmlab's presets, or from the user. The weights are created when a
class of transformers first loads them, and saved in the simulation's memory, so that the library's own loading runs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from ..base.errors import LabWarning, NotAvailable, SpecError
from ..simulation.patching.imports import on_import
from ..specs import hub_cache
from ..specs.generic import architecture
from ..specs.model import model as find_model
from ..specs.model import models
from .missing import GIVE

REVISION = "0" * 40
# The former names of these models on the hub, and their current ones.
MOVED = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
# Families from before half precision, whose configs on the Hub name no dtype.
IN_FLOAT32 = ("albert", "bart", "bert", "distilbert", "gpt2", "roberta", "t5", "xlm-roberta")
FEW_TOKENS = 256  # a tokenizer with fewer cannot encode every byte, so it has only special tokens
NOT_CHANGED = "llmlab run does not change the Hub"
UPLOADS = ("create_repo", "create_branch", "create_commit", "upload_file", "upload_folder")  # of huggingface_hub
WEIGHTS_FILE = "model.safetensors"
WEIGHTS = (".safetensors", ".bin", ".index.json")


def read_configs(texts: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the configs by model name from texts NAME=config.json. Raises SpecError for any other text, and for a file
    that is no transformers config."""
    configs = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise SpecError(f"--config {text}; give NAME=config.json, where NAME is what the script loads")
        try:
            config = json.loads(Path(path).read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{path} is not JSON: {error}") from None
        if not isinstance(config, dict) or "model_type" not in config:
            raise SpecError(f"{path} has no model_type; give the config.json of a transformers model")
        configs[name] = config
    return configs


@contextmanager
def models_by_name(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Let transformers find `configs`, the presets and the content of the Hugging Face cache, without network access.

    Enter it inside a simulator.
    """
    with tempfile.TemporaryDirectory(prefix="llmlab-hub-") as folder, ExitStack() as stack:
        _fill(Path(folder), configs)
        settings = {"HF_HUB_CACHE": folder, "HF_HUB_OFFLINE": "1"}
        stack.enter_context(mock.patch.dict(os.environ, settings))
        constants = sys.modules.get("huggingface_hub.constants")
        if constants is not None:  # it has read the environment
            stack.enter_context(mock.patch.multiple(constants, HF_HUB_CACHE=folder, HF_HUB_OFFLINE=True))
        old = sys.modules.get("transformers.utils.hub")  # of transformers 4, which has also read the environment
        if hasattr(old, "TRANSFORMERS_CACHE"):
            stack.enter_context(mock.patch.object(old, "TRANSFORMERS_CACHE", folder))
        hooks: dict[str, Callable[[], Any]] = {
            "transformers.modeling_utils": lambda: stack.enter_context(_created_weights(Path(folder))),
            "transformers.tokenization_utils_base": lambda: stack.enter_context(_tokenizers_with_files()),
            "kernels": lambda: stack.enter_context(_no_kernels()),
            "huggingface_hub.hf_api": lambda: stack.enter_context(_no_uploads()),
            "trackio": lambda: stack.enter_context(_no_space()),
        }
        stack.enter_context(on_import(hooks))
        yield


@cache
def _presets() -> tempfile.TemporaryDirectory:
    """Return a folder with an entry for each preset. It is made once per process, because removing its hundreds of
    folders can take seconds."""
    folder = tempfile.TemporaryDirectory(prefix="llmlab-presets-")
    configs = {name: find_model(name).config for name in models()}
    configs |= {alias: configs[name] for name, alias in MOVED.items() if name in configs}
    for name, config in configs.items():
        _add(Path(folder.name), name, config)
    return folder


def _add(folder: Path, name: str, config: Mapping[str, Any]) -> None:
    """Add an entry for the model `name` to the cache in `folder`."""
    config = dict(config)
    if (made := architecture(config["model_type"])) is not None:  # scripts find the class by it
        config.setdefault("architectures", [made])
    entry = folder / hub_cache.entry_of(name)
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(REVISION, "utf-8")
    snapshot = entry / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config, default=dict), "utf-8")


def _fill(folder: Path, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Fill a cache with `configs`, and with links to the other entries of the real cache and to the other presets."""
    for name, config in configs.items():
        _add(folder, name, config)
    replaced = {hub_cache.entry_of(name) for name in configs}
    real = hub_cache.folder()
    cached = {path.name: path for path in real.iterdir() if path.name not in replaced} if real.is_dir() else {}
    for path in Path(_presets().name).iterdir():
        if path.name not in replaced | cached.keys():
            (folder / path.name).symlink_to(path)
    for entry, path in cached.items():
        main = path / "refs" / "main"
        snapshot = path / "snapshots" / main.read_text("utf-8").strip() if main.is_file() else path
        if entry.startswith("models--") and (snapshot / "config.json").is_file() and not _has_weights(snapshot):
            own_snapshot = folder / entry / "snapshots" / snapshot.name  # our own folder, for the weights
            own_snapshot.mkdir(parents=True)
            (folder / entry / "refs").symlink_to(path / "refs")
            for file in snapshot.iterdir():
                (own_snapshot / file.name).symlink_to(file.resolve())
        else:
            (folder / entry).symlink_to(path)


def _has_weights(folder: Path) -> bool:
    return any(name.endswith(WEIGHTS) for name in os.listdir(folder))


@contextmanager
def _created_weights(hub: Path) -> Iterator[None]:
    """Let from_pretrained of transformers' models create the checkpoint if there is only a config."""
    from transformers import PreTrainedModel

    real = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    created: set[Path] = set()

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        folder = _snapshot(hub, str(name), kwargs.get("subfolder") or "")
        if folder is not None and folder not in created and not _has_weights(folder):
            created.add(folder)
            _check_weights(str(name), folder, kwargs)
            _save(cls, folder, kwargs.get("config"))
        return real(cls, name, *args, **kwargs)

    with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
        yield


def _check_weights(name: str, folder: Path, asked: Mapping[str, Any]) -> None:
    """Warn if the weights of the Hub may be loaded in another form than those that are simulated.

    Weights are loaded in float32 if neither the script nor the config names a dtype. The config of a preset never does,
    and most models of the Hub are in bfloat16. It never names MXFP4 either, in which gpt-oss is published.
    """
    from transformers import __version__

    usual = "auto" if int(__version__.partition(".")[0]) >= 5 else "float32"  # of from_pretrained
    config = json.loads((folder / "config.json").read_text("utf-8"))
    plain = "quantization_config" not in config
    if config.get("model_type") == "gpt_oss" and plain and not asked.get("quantization_config"):
        warnings.warn(
            f"{name}: gpt-oss is published in MXFP4, which transformers keeps if the kernels package is installed, and "
            "which cannot be trained. The simulated weights are dequantized; for these, give "
            "quantization_config=Mxfp4Config(dequantize=True) in the script",
            LabWarning, stacklevel=2,
        )  # fmt: skip
    if (asked.get("dtype") or asked.get("torch_dtype") or usual) != "auto" or not plain:
        return
    if config.get("model_type") not in IN_FLOAT32 and not (config.get("dtype") or config.get("torch_dtype")):
        warnings.warn(
            f"{name}: its config names no dtype, so its weights are loaded in float32. If those of the Hub are in "
            "bfloat16, give dtype=torch.bfloat16 in the script, or the Hub's config.json with --config",
            LabWarning, stacklevel=2,
        )  # fmt: skip


@contextmanager
def _tokenizers_with_files() -> Iterator[None]:
    """Refuse a tokenizer whose files are missing, because transformers 5 silently creates one without tokens."""
    from transformers import PreTrainedTokenizerBase

    real = PreTrainedTokenizerBase.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        tokenizer = real(cls, name, *args, **kwargs)
        files = tokenizer.vocab_files_names
        read = [file for file in files if tokenizer.init_kwargs.get(file) is not None]  # some classes do not record it
        if files and not read and len(tokenizer) < FEW_TOKENS:
            raise NotAvailable(f"the tokenizer of {name}: {' or '.join(files.values())} is missing; {GIVE}")
        return tokenizer

    with mock.patch.object(PreTrainedTokenizerBase, "from_pretrained", classmethod(from_pretrained)):
        yield


@contextmanager
def _no_kernels() -> Iterator[None]:
    """Refuse the compiled kernels of the hub."""
    import kernels

    def get_kernel(name: str, *args: Any, **kwargs: Any) -> Any:
        why = "kernels from the Hub are compiled for a GPU; use PyTorch's own operators in the script"
        raise NotAvailable(f"kernels.get_kernel({name!r}): {why}")

    if not hasattr(kernels, "get_kernel"):  # a file of the script's own, kernels.py
        yield
        return
    with mock.patch.object(kernels, "get_kernel", get_kernel):
        yield


@contextmanager
def _no_uploads() -> Iterator[None]:
    """Let a script create and fill repositories of the Hub, without uploading anything; a warning says so."""
    from concurrent.futures import Future

    from huggingface_hub import hf_api

    def upload(api: Any, repo_id: str, *args: Any, run_as_future: bool = False, **kwargs: Any) -> Any:
        warnings.warn(f"nothing was uploaded to {repo_id}: {NOT_CHANGED}", LabWarning, stacklevel=2)
        url = hf_api.RepoUrl(f"https://huggingface.co/{repo_id if '/' in repo_id else f'you/{repo_id}'}")
        if not run_as_future:
            return url
        done: Future = Future()
        done.set_result(url)
        return done

    with ExitStack() as stack:
        for name in UPLOADS:
            stack.enter_context(mock.patch.object(hf_api.HfApi, name, upload))
            stack.enter_context(mock.patch.object(hf_api, name, getattr(hf_api.api, name)))
        yield


@contextmanager
def _no_space() -> Iterator[None]:
    """Let trackio keep its log here, although the script names a Space of the Hub for it; a warning says so."""
    trackio: Any = import_module("trackio")
    real = trackio.init

    def init(*args: Any, space_id: str | None = None, **kwargs: Any) -> Any:
        if space_id is not None:
            warning = f"trackio's space_id={space_id!r} was not carried out: {NOT_CHANGED}"
            warnings.warn(warning, LabWarning, stacklevel=2)
        return real(*args, **kwargs)

    with mock.patch.object(trackio, "init", init):
        yield


def _snapshot(hub: Path, name: str, subfolder: str) -> Path | None:
    """Return the folder that transformers loads `name` from, if it has a config."""
    if os.path.isdir(name):
        folder = Path(name)
    else:
        snapshot = hub_cache.snapshot(name, hub)
        if snapshot is None:
            return None
        folder = snapshot
    return folder / subfolder if (folder / subfolder / "config.json").is_file() else None


def _save(cls: Any, folder: Path, config: Any) -> None:
    """Save the weights of a model of class `cls` with this config, without values, into `folder`. Write nothing else,
    because the other files are the user's, or links to them."""
    import torch
    from transformers import modeling_utils

    from ..simulation.host_tensors import uncounted

    config = cls.config_class.from_pretrained(folder) if config is None else deepcopy(config)  # saving changes it
    with _silent():
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        # Under ZeRO-3, models within the model would be created in parts, one for each rank.
        whole = mock.patch.object(modeling_utils, "is_deepspeed_zero3_enabled", lambda: False)
        with tempfile.TemporaryDirectory() as own, whole, uncounted():
            cls(config).to(dtype).save_pretrained(own, max_shard_size="1000TB")
            os.replace(os.path.join(own, WEIGHTS_FILE), folder / WEIGHTS_FILE)  # in memory


@contextmanager
def _silent() -> Iterator[None]:
    """Silence all messages about a checkpoint that we create, because the script does not create it."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
