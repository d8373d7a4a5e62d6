"""This machine: the device that torch would use, its card in the GPU table, memory, versions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..base.units import show_bytes
from ..base.version import __version__
from . import pretend
from .gpu import BF16_CAPABILITY, FLASH_ATTENTION_2_CAPABILITY, GPU, match

# The packages whose version changes the cost of a run, by their names on the package index.
PACKAGES = ("torch", "transformers", "triton", "bitsandbytes", "deepspeed", "peft", "flash-attn")

CONTAINER_LIMITS = (  # limit and use, cgroup v2 and v1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Host:
    """One machine and the device that torch would use on it.

    `device`: "cuda", "mps" or "cpu" ("cpu" too without torch). `name`: the device's name in torch; on a CPU its model.
    `gpu`: the card in the table, or None. `memory`: bytes of the device; on a CPU bytes of RAM, within a container's
    limit; None where the system does not say. `count`: devices of that kind. `versions`: installed packages.
    `compute_capability`: CUDA's (ROCm: gfx major and minor), None elsewhere. With LLMLAB_AS set, `name`, `gpu`,
    `memory` and `compute_capability` are those of the pretended card.
    """

    device: str
    name: str
    gpu: GPU | None
    memory: int | None
    cpu: str
    cores: int
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    count: int = 1
    driver: str | None = None
    compute_capability: tuple[int, int] | None = None

    @property
    def supports_bf16(self) -> bool:
        """Whether the device is a CUDA GPU with bf16 units: from capability 8.0. False on a CPU and on MPS."""
        return self.compute_capability is not None and self.compute_capability >= BF16_CAPABILITY

    @property
    def supports_flash_attention_2(self) -> bool:
        """Whether FlashAttention-2 runs on the device: CUDA from capability 8.0."""
        return self.compute_capability is not None and self.compute_capability >= FLASH_ATTENTION_2_CAPABILITY

    def __str__(self) -> str:
        torch = self.versions.get("torch", "not installed")
        return f"{self.name} ({self.device}, {show_bytes(self.memory)}), torch {torch}, Python {self.python}"


def host() -> Host:
    """Return this machine. Imports torch where it is installed, and asks the GPU's driver.

    Raises NotAvailable where LLMLAB_AS names a card that this machine cannot pretend to be.
    """
    import platform

    versions = {package: found for package in PACKAGES if (found := installed(package))}
    cpu, driver = _cpu(), None
    device, name, memory, capability, count = ("cpu", cpu, _ram(), None, 1)
    if "torch" in versions:
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            device, name, memory = "cuda", properties.name, properties.total_memory
            capability, count = (properties.major, properties.minor), torch.cuda.device_count()
            # torch only knows the CUDA version of its own libraries.
            driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        elif torch.backends.mps.is_available():
            device, name, memory = "mps", f"{cpu} GPU", torch.mps.recommended_max_memory()
    card = match(name, memory) if device == "cuda" and memory else None
    if wanted := pretend.pretended():
        pretend.cap(wanted, memory if device == "cuda" else None, capability)
        card, memory, capability = wanted, wanted.memory, wanted.compute_capability
        name = f"{wanted.name} (pretended on {name})"
    return Host(
        device=device,
        name=name,
        gpu=card,
        memory=memory,
        cpu=cpu,
        # A container or taskset can leave this process fewer cores than the machine has.
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        python=platform.python_version(),
        versions=versions,
        count=count,
        driver=driver or None,
        compute_capability=capability,
    )


def environment() -> dict[str, str]:
    """Return where a measurement was made, for `Report.environment`.

    Keys: device (its name in torch), python, the installed packages of PACKAGES, driver (on a GPU), llmlab (the
    checkout's commit, with "-dirty" where it has changes, or the package version) and date (ISO, UTC).
    """
    from datetime import datetime, timezone

    here = host()
    facts = {"device": here.name, "python": here.python, **here.versions}
    if here.driver:
        facts["driver"] = here.driver
    return {**facts, "llmlab": _commit(), "date": datetime.now(timezone.utc).date().isoformat()}


def installed(package: str) -> str | None:
    """Return the version of `package` that is installed, or None; imports nothing of it."""
    # Here and below: `import llmlab` loads this module, and these standard ones would be a third of its time.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # else it is somebody else's repository, in whose environment we are installed
        return __version__
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*") or __version__


def _output(*command: str) -> str:
    """Return what `command` prints, or "" where it is missing, fails or hangs: these facts are not worth an error."""
    import subprocess

    try:
        done = subprocess.run(list(command), capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    import platform

    brand = ""
    if (info := Path("/proc/cpuinfo")).exists():
        found = re.search(r"^model name\s*: *(\S.*)", info.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        brand = found[1].strip() if found else ""
    elif platform.system() == "Darwin":
        brand = _output("sysctl", "-n", "machdep.cpu.brand_string")
    return brand or platform.processor() or platform.machine() or "CPU"


def container_memory() -> list[tuple[int, int | None]]:
    """Return the memory limits of containers in bytes, each with the bytes in use, None where that is not known.

    Past a limit the kernel kills the process, however much RAM the machine has.
    """
    found = []
    for limit, used in CONTAINER_LIMITS:
        if Path(limit).exists() and (text := Path(limit).read_text("utf-8").strip()).isdigit():  # "max" is none
            found.append((int(text), int(Path(used).read_text("utf-8")) if Path(used).exists() else None))
    return found


def _ram() -> int | None:
    sizes = [limit for limit, _ in container_memory()]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(sizes, default=None)
