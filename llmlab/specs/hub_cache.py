"""Configs of models in Hugging Face's cache, and their download, which happens only on request."""

from __future__ import annotations

import os
from pathlib import Path

from ..base.errors import NotAvailable, SpecError

CONFIG = "config.json"


def folder() -> Path:
    """Return Hugging Face's cache: huggingface_hub/constants.py."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def snapshot(name: str, cache: Path) -> Path | None:
    """Return the folder of `cache` from which a library loads `name`, or None if there is none."""
    entry = cache / entry_of(name)
    main = entry / "refs" / "main"
    return entry / "snapshots" / main.read_text(encoding="utf-8").strip() if main.is_file() else None


def entry_of(name: str) -> str:
    """Return the name of a model's entry in the cache, such as "models--openai-community--gpt2"."""
    return "models--" + name.replace("/", "--")


def cached_config(name: str) -> Path | None:
    """Return the config.json of "organisation/model" in the cache, or None if it is missing."""
    path = snapshot(name, folder())
    return path / CONFIG if path is not None and (path / CONFIG).is_file() else None


def download_config(name: str) -> Path:
    """Fetch the config.json of "organisation/model" from Hugging Face's hub into its cache, and return its path.

    Raises NotAvailable without huggingface_hub or a network, and if the hub refuses; raises SpecError for an invalid
    name.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise NotAvailable("--download needs huggingface_hub: pip install huggingface_hub") from None
    try:
        return Path(hf_hub_download(name, CONFIG))
    except HFValidationError:
        raise SpecError(f"{name!r} is not a model name on the Hub; give ORGANISATION/MODEL") from None
    except GatedRepoError:
        raise NotAvailable(
            f"{name} is gated: accept its licence on its page, then log in with `hf auth login` and ask again"
        ) from None
    except RepositoryNotFoundError:
        raise NotAvailable(f"the Hub has no model {name}, or it is private; check the name on huggingface.co") from None
    except LocalEntryNotFoundError as error:
        why = error.__cause__ or error
        if isinstance(why, HfHubHTTPError):
            raise _refused(name, why) from None
        raise NotAvailable(f"the Hub does not answer ({type(why).__name__}); check the network connection") from None
    except EntryNotFoundError:
        raise NotAvailable(f"{name} has no {CONFIG} on the Hub; give the path of your own config.json") from None
    except HfHubHTTPError as error:
        raise _refused(name, error) from None


def _refused(name: str, error: Exception) -> NotAvailable:
    return NotAvailable(f"the Hub refused {name}: {str(error).splitlines()[0]}")
