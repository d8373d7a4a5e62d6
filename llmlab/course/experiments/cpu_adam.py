"""DeepSpeedCPUAdam, the AdamW that DeepSpeed compiles for the host, and its time compared with torch's AdamW."""

from __future__ import annotations

import os
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from ...base.compat import symbol
from ...base.errors import NotAvailable
from .engines import ADAMW, quiet_deepspeed


def cpu_adam() -> type:
    """Return DeepSpeedCPUAdam; raises NotAvailable where it cannot be compiled."""
    if (lock := _build_folder() / "lock").exists():  # torch.utils.file_baton would wait for it forever
        raise NotAvailable(f"DeepSpeedCPUAdam is being compiled, or a process that did was killed: then delete {lock}")
    quiet_deepspeed()
    DeepSpeedCPUAdam = symbol("deepspeed.ops.adam.DeepSpeedCPUAdam")
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])  # pip's ninja
    try:
        DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1, device="cpu"))])
    except (RuntimeError, OSError, ImportError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise NotAvailable(f"DeepSpeedCPUAdam needs a C++ compiler and ninja: {reason}") from None
    return DeepSpeedCPUAdam


def cpu_adam_is_compiled() -> bool:
    """Return whether DeepSpeedCPUAdam is compiled already, with the headers of this torch: another environment, whose
    builds are in the same folder, or a torch that was installed later would compile it again."""
    folder, headers = _build_folder(), str(Path(torch.__file__).with_name("include"))
    library, build = folder / "cpu_adam.so", folder / "build.ninja"
    if find_spec("deepspeed") is None or (folder / "lock").exists() or not library.exists() or not build.exists():
        return False
    is_newer = library.stat().st_mtime > Path(torch.__file__).stat().st_mtime
    return is_newer and headers in build.read_text("utf-8")


def _build_folder() -> Path:
    """Return the folder in which torch.utils.cpp_extension compiles DeepSpeedCPUAdam."""
    return Path(symbol("torch.utils.cpp_extension._get_build_directory")("cpu_adam", False))


def adam_times(elements: int = 2**22, steps: int = 5) -> dict[str, dict[str, float]]:
    """Return, for each AdamW, the CPU seconds of its fastest step on one thread, and the largest error of its weights.

    Errors are relative to torch's loop over parameters. DeepSpeedCPUAdam is included where it is compiled.
    """
    torch.set_num_threads(1)
    kinds: dict[str, tuple[type, dict]] = {
        "torch, one by one": (torch.optim.AdamW, {"foreach": False}),
        "torch, fused": (torch.optim.AdamW, {"fused": True}),
    }
    if cpu_adam_is_compiled():
        kinds["DeepSpeedCPUAdam"] = (cpu_adam(), {})
    result, reference = {}, None
    for name, (kind, options) in kinds.items():
        weight = nn.Parameter(torch.linspace(-1, 1, elements))
        optimizer = kind([weight], **ADAMW, **options)
        seconds = []
        for step in range(steps):
            weight.grad = torch.linspace(-1, 1, elements).roll(step)
            start = time.process_time()  # other programs may interrupt a step, which takes milliseconds
            optimizer.step()
            seconds.append(time.process_time() - start)
        reference = weight.detach() if reference is None else reference
        result[name] = {"seconds": min(seconds), "off": (weight.detach() - reference).abs().max().item()}
    return result
