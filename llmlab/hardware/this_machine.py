"""This machine: the device that torch would use, its entry in the GPU table, memory, versions."""

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

# The packages whose version changes the cost of a run, by their names on PyPI.
PACKAGES = ("torch", "transformers", "triton", "bitsandbytes", "deepspeed", "peft", "flash-attn")

CONTAINER_LIMITS = (  # limit and use, cgroup v2 and v1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Host:
    """One machine and the device that torch would use on it.

    `device`: "cuda", "mps" or "cpu" ("cpu" too without torch). `name`: the device's name in torch, or the CPU model.
    `gpu`: its entry in the GPU table, or None. `memory`: bytes of the device; for a CPU the bytes of RAM, up to a
    container's limit; None if the system does not report them. `count`: number of devices of that kind. `versions`:
    installed packages. `compute_capability`: that of CUDA (ROCm: gfx major and minor), else None. With LLMLAB_AS set,
    `name`, `gpu`, `memory` and `compute_capability` are those of the emulated GPU.
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
        """Whether the device is a CUDA GPU with bf16 units (capability 8.0 or more). False on a CPU and on MPS."""
        return self.compute_capability is not None and self.compute_capability >= BF16_CAPABILITY

    @property
    def supports_flash_attention_2(self) -> bool:
        """Whether FlashAttention-2 runs on the device (CUDA with capability 8.0 or more)."""
        return self.compute_capability is not None and self.compute_capability >= FLASH_ATTENTION_2_CAPABILITY

    def __str__(self) -> str:
        torch = self.versions.get("torch", "not installed")
        return f"{self.name} ({self.device}, {show_bytes(self.memory)}), torch {torch}, Python {self.python}"


def host() -> Host:
    """Return this machine. Imports torch if it is installed, and asks the GPU's driver.

    Raises NotAvailable if LLMLAB_AS names a GPU that this machine cannot emulate.
    """
    import platform

    versions = {package: version for package in PACKAGES if (version := installed(package))}
    cpu, driver = _cpu(), None
    device, name, memory, capability, count = ("cpu", cpu, _ram(), None, 1)
    if "torch" in versions:
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            device, name, memory = "cuda", properties.name, properties.total_memory
            capability, count = (properties.major, properties.minor), torch.cuda.device_count()
            # torch knows only the CUDA version of its own libraries.
            driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        elif torch.backends.mps.is_available():
            device, name, memory = "mps", f"{cpu} GPU", torch.mps.recommended_max_memory()
    table_entry = match(name, memory) if device == "cuda" and memory else None
    if emulated := pretend.pretended():
        pretend.cap(emulated, memory if device == "cuda" else None, capability)
        table_entry, memory, capability = emulated, emulated.memory, emulated.compute_capability
        name = f"{emulated.name} (pretended on {name})"
    return Host(
        device=device,
        name=name,
        gpu=table_entry,
        memory=memory,
        cpu=cpu,
        # A container or taskset can restrict this process to some of the machine's cores.
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        python=platform.python_version(),
        versions=versions,
        count=count,
        driver=driver or None,
        compute_capability=capability,
    )


def environment() -> dict[str, str]:
    """Return the environment of a measurement, for `Report.environment`.

    Keys: device (its name in torch), python, the installed packages of PACKAGES, driver (on a GPU), llmlab (the
    checkout's commit, with "-dirty" if it has changes, or the package version) and date (ISO, UTC).
    """
    from datetime import datetime, timezone

    machine = host()
    facts = {"device": machine.name, "python": machine.python, **machine.versions}
    if machine.driver:
        facts["driver"] = machine.driver
    return {**facts, "llmlab": _commit(), "date": datetime.now(timezone.utc).date().isoformat()}


def installed(package: str) -> str | None:
    """Return the installed version of `package`, or None, without importing it."""
    # Imported here and below, because `import llmlab` loads this module, and they would take a third of its time.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # else a parent repository, in whose environment we are installed
        return __version__
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*") or __version__


def _output(*command: str) -> str:
    """Return the output of `command`, or "" if it is missing, fails or hangs, because its facts are optional."""
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
        model = re.search(r"^model name\s*: *(\S.*)", info.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        brand = model[1].strip() if model else ""
    elif platform.system() == "Darwin":
        brand = _output("sysctl", "-n", "machdep.cpu.brand_string")
    return brand or platform.processor() or platform.machine() or "CPU"


def container_memory() -> list[tuple[int, int | None]]:
    """Return the memory limits of containers in bytes, each with the bytes in use, or None if unknown.

    Beyond a limit the kernel kills the process, regardless of the machine's RAM.
    """
    limits = []
    for limit, usage in CONTAINER_LIMITS:
        if Path(limit).exists() and (text := Path(limit).read_text("utf-8").strip()).isdigit():  # "max" means no limit
            limits.append((int(text), int(Path(usage).read_text("utf-8")) if Path(usage).exists() else None))
    return limits


def _ram() -> int | None:
    sizes = [limit for limit, _ in container_memory()]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(sizes, default=None)
