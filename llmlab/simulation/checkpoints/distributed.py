"""torch.distributed.checkpoint for tensors without values: its files are kept in memory instead of on disk.

Its planners and readers run unchanged, so they use the same GPU memory as on a real GPU; copies go to the host. The
file of this rank is kept, and the files of other ranks, which do not exist here, are empty. An asynchronous save runs
synchronously, because another thread would not see the GPU.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from ...base.compat import symbol
from ...base.errors import LabWarning, NotAvailable
from ..values.placeholders import located
from .files import NOT_WRITTEN
from .virtual_files import KeptFile

DCP = "torch.distributed.checkpoint."


@contextmanager
def distributed_checkpoints(contents: dict[str, Any]) -> Iterator[None]:
    """Let torch.distributed.checkpoint write its files to `contents`, by absolute path, and read them from there."""
    files, writer = symbol(DCP + "filesystem.FileSystem"), symbol(DCP + "filesystem._FileSystemWriter")
    planner = symbol(DCP + "default_planner")
    saver, package = symbol(DCP + "state_dict_saver"), symbol(DCP.rstrip("."))
    patches: list[tuple[Any, str, Any]] = [
        (files, "create_stream", _stream(contents, files.create_stream)),
        (files, "rename", lambda self, path, new_path: os.rename(path, new_path)),
        (files, "rm_file", lambda self, path: os.remove(path)),
        (files, "ls", lambda self, path: [os.path.join(path, name) for name in os.listdir(path)]),
        (writer, "__init__", _one_thread(writer.__init__)),
        (planner, "dedup_save_plans", _first_plan_alone),
        (planner, "_validate_global_plan", lambda plans, metadata: []),
        (symbol(DCP + "hf_storage.HuggingFaceStorageWriter"), "__init__", _refused),
        *((module, "async_save", _saved_now(saver)) for module in (saver, package)),
    ]
    with ExitStack() as stack:
        for owner, name, function in patches:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def _stream(contents: dict[str, Any], real: Callable) -> Callable:
    @contextmanager
    def create_stream(self: Any, path: Any, mode: str) -> Iterator[Any]:
        name = os.path.abspath(path)
        if "r" not in mode:
            with KeptFile(lambda content: contents.__setitem__(name, content)) as file:
                yield file
            if ".metadata" in os.path.basename(name):  # the last file of a checkpoint
                warnings.warn(NOT_WRITTEN.format(os.path.dirname(name)), LabWarning, stacklevel=2)
        elif isinstance(contents.get(name), bytes):
            yield io.BytesIO(contents[name])
        else:
            with real(self, path, mode) as file:
                yield file

    return create_stream


def _one_thread(init: Callable) -> Callable:
    """_FileSystemWriter.__init__ with one thread, which sees the GPU, one tensor at a time, and without fsync."""

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.thread_count, self.per_thread_copy_ahead, self.sync_files = 1, 0, False

    return call


def _first_plan_alone(plans: list[Any], *options: Any) -> list[Any]:
    """dedup_save_plans: all plans are copies of this rank's plan, so only the first keeps its items."""
    return [*plans[:1], *(replace(plan, items=[]) for plan in plans[1:])]


def _saved_now(saver: Any) -> Callable:
    def async_save(
        state_dict: Any, *, async_checkpointer_type: Any = None, async_stager: Any = None, **options: Any
    ) -> Any:
        """torch.distributed.checkpoint.async_save, which saves before it returns."""
        done: Future = Future()
        done.set_result(saver.save(state_dict, **options))
        if getattr(getattr(async_stager, "_config", None), "use_async_staging", False):
            return saver.AsyncSaveResponse(staging_completion=done, upload_completion=done)
        return done

    return async_save


def _refused(self: Any, *args: Any, **kwargs: Any) -> None:
    raise located(NotAvailable(
        "torch.distributed.checkpoint.HuggingFaceStorageWriter writes bytes of tensors, and those of the simulated "
        "GPU have none; use FileSystemWriter"
    ))  # fmt: skip
