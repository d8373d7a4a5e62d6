"""The GPU table: one TOML file, every figure with its source, read without torch.

    >>> gpu("a100-80gb").name
    'A100-80GB'
    >>> gpu("Tesla T4").peak("bf16") is None      # the chip has no bf16 matrix units
    True
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ..base.errors import NotAvailable, SpecError, unknown_name
from ..base.notes import Note
from ..base.units import GiB, show_bytes
from .tables import cited, read_table, values_of

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")

BF16_CAPABILITY = (8, 0)  # Ampere. torch.cuda.is_bf16_supported() is True on a T4 (7.5) too: it counts emulation.
# Emulated matmuls reach 2.25 TFLOP/s on a T4 and 9.4 on a V100, where fp16 reaches 25 and 84, and fp32 4 and 13
# (chsasank/device-benchmarks, README.md at 7ccc883).
EMULATED_BF16 = "PyTorch's emulation takes about ten times as long as fp16"
FLASH_ATTENTION_2_CAPABILITY = (8, 0)  # Dao-AILab/flash-attention README: Ampere, Ada, Hopper
# Major versions of Hopper and data-centre Blackwell, where SDPA prefers cuDNN's kernel (aten/src/ATen/native/
# transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention).
CUDNN_ATTENTION_MAJORS = (9, 10)

# For the same GPU, drivers report up to 3 % more or less memory (ECC, version, Windows). GPUs that share a name differ
# by more.
MEMORY_TOLERANCE = 0.05
# A program sees at least this share of the advertised memory: 0.91 on a T4, 0.92 on an A40, both with ECC.
LEAST_SHARE = 0.9
SEVERAL = re.compile(r"(\d+)\s*[x×*]\s*(.+)|(.+?)\s*[x×*]\s*(\d+)", re.IGNORECASE)  # 2xT4, T4 x2
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)
# Accelerators whose backend of PyTorch is not simulated, by what to say of them; names as `_plain` writes them.
OTHER_BACKENDS = {
    "Apple's GPUs run PyTorch's MPS backend, which is not simulated": r"(apple)?m[1-9](pro|max|ultra)?(\d+gb)?|mps",
    "Intel's GPUs run PyTorch's XPU backend, which is not simulated": (
        r"(intel)?(arc\w*|a(310|380|580|750|770)|b(50|60|570|580)|(datacentergpu)?max1[15]50|xpu)(\d+gb)?"
    ),
    "this accelerator has a backend of its own, which is not simulated": (
        r"(google)?(cloud)?tpu\w*|(intel|habana)*gaudi\d?|(aws)?(trainium|trn|inferentia)\d?|(huawei)?(ascend)?910[bc]?"
    ),
}

PRICES = ("serverless", "rental", "purchase")
# Under a lower power limit, clocks scale with the cube root of the power, because power scales with the clock times the
# square of the voltage, and the voltage scales with the clock. Measured rates of large matmuls agree within 10 %: A100s
# of 250 and 300 W reach 0.81 and 0.90 of one with 400 W, where the rule gives 0.85 and 0.91 (measured_rates.toml). An
# H100 PCIe of 350 W reaches 0.63 of one with 700 W and more multiprocessors, where the rule gives 0.69. A GB300 at 500
# of 1400 W reached 0.28 to 0.39 instead of 0.71 (facebookexperimental/triton, pull request 2023), so the rule does not
# hold below half the limit.
LEAST_POWER = 0.5


@dataclass(frozen=True)
class Price:
    """The price of one GPU in US dollars, per hour ("serverless", "rental") or to buy ("purchase"); see prices.toml.
    `date` is ISO, or None if the source has no date."""

    kind: str
    usd: float
    source: str
    date: str | None = None


@dataclass(frozen=True, repr=False)
class GPU:
    """One accelerator. Rates are dense (no 2:4 sparsity) and theoretical. None means that the chip lacks the feature,
    or that the figure is unknown.

    `memory`: bytes that a program sees (the driver's total). `bandwidth`: bytes/s of device memory. `peak_flops`:
    FLOP/s (int8: op/s) by dtype, one of `DTYPES`. `sms`: multiprocessors (AMD: compute units). `nvlink` (AMD: Infinity
    Fabric), `pcie`: bytes/s in one direction. `power`: the power limit in W. `context`, `nccl`: bytes that the CUDA
    context and, with several ranks, NCCL use outside the allocator. `cublas_workspace`: bytes that each cuBLAS handle
    allocates. `announced`: year and month, "2022-03". `node_gpus`: number of GPUs in the usual node. `peer_access`:
    whether GPUs reach each other's memory through PCIe.
    `prices` age, so each has a date; `usd_per_hour` and `usd` are the first price per hour and the first purchase
    price. `checked` (ISO date) refers to the other figures, and `sources` maps fields to sources.
    """

    name: str
    vendor: str
    architecture: str
    memory: int
    bandwidth: float
    peak_flops: Mapping[str, float]
    sms: int
    compute_capability: tuple[int, int] | None = None
    nvlink: float | None = None
    pcie: float | None = None
    context: int | None = None
    nccl: int | None = None
    cublas_workspace: int | None = None
    usd_per_hour: float | None = None
    usd: float | None = None
    prices: tuple[Price, ...] = ()
    announced: str | None = None
    node_gpus: int = 8
    peer_access: bool = True
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    checked: str = ""
    power: float | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    def outside(self, ranks: int = 1) -> int | None:
        """Return the bytes outside the allocator in one process of `ranks`; None if a part is unknown."""
        parts = (self.context,) if ranks == 1 else (self.context, self.nccl)
        return None if None in parts else sum(part for part in parts if part)

    def room(self, ranks: int = 1) -> int:
        """Return the bytes available to the allocator; an unknown part outside of it counts as 0."""
        return self.memory - (self.context or 0) - (self.nccl or 0 if ranks > 1 else 0)

    def peak(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s for `dtype`, or None if the chip has no units for it."""
        if dtype not in DTYPES:
            raise SpecError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        return self.peak_flops.get(dtype)

    @property
    def supports_bf16(self) -> bool:
        """Whether the chip has bf16 matrix units."""
        return "bf16" in self.peak_flops

    @property
    def by_memory(self) -> bool:
        """Whether the GPU was named by its memory alone, such as "48GB": times on it are unknown."""
        return bool(SIZE.fullmatch(self.name))

    @property
    def supports_flash_attention_2(self) -> bool:
        """Whether FlashAttention-2 runs: on NVIDIA since Ampere (compute capability 8.0), and on AMD's CDNA."""
        if self.compute_capability is None:
            return self.vendor == "AMD"
        return self.compute_capability >= FLASH_ATTENTION_2_CAPABILITY

    def prefers_cudnn_attention(self, key_size: int, value_size: int, dropout: float = 0.0) -> bool:
        """Whether SDPA prefers cuDNN's kernel to FlashAttention; False if the capability is unknown."""
        capability = self.compute_capability
        return capability is not None and prefers_cudnn_attention(capability, key_size, value_size, dropout)

    def __str__(self) -> str:
        return f"{self.name} ({self.vendor} {self.architecture}, {show_bytes(self.memory)})"

    def __repr__(self) -> str:
        return f"<GPU: {self}>"


def prefers_cudnn_attention(capability: tuple[int, int], key_size: int, value_size: int, dropout: float = 0.0) -> bool:
    """Return whether SDPA prefers cuDNN's kernel to FlashAttention for heads of these sizes in half precision.

    As torch 2.13 with the cuDNN of its CUDA 13 wheels, 9.20 (sdp_utils.cpp: check_prefer_cudnn_attention,
    check_cudnn_tensor_shapes and check_cudnn_dropout, which accepts multiples of 1/16).
    """
    widest = 256 if capability == (9, 0) else 128
    fits = max(key_size, value_size) <= widest or (key_size, value_size) == (192, 128)
    whole = key_size % 8 == value_size % 8 == 0 and (16 * dropout).is_integer()
    return capability[0] in CUDNN_ATTENTION_MAJORS and fits and whole


def gpu(name: str | GPU, power: float | None = None) -> GPU:
    """Return the GPU called `name`, such as "T4", "a100" or "rtx 4090", or its name in torch, "NVIDIA A100-SXM4-80GB".

    Case, spaces, hyphens and the words NVIDIA, AMD, Tesla, GeForce and Instinct are ignored. Without a memory size,
    "a100" is the A100-80GB and "v100" the V100-16GB; without a form factor, a data-centre GPU is the SXM board. A `GPU`
    is returned unchanged. "48GB" means any GPU with that advertised memory, and has the least that such a GPU shows to
    a program; "44.5GiB" has exactly that much. Times on both are unknown. Any other name that is not in the table
    raises UnknownName (a LookupError), because the figures of a similar GPU would be wrong. Accelerators without CUDA
    or ROCm, such as Apple's and Intel's GPUs, raise NotAvailable.

    `power` is a limit in W below the GPU's own, but at least half of it. It lowers the clocks, and so the peaks. Raises
    NotAvailable for a GPU whose own limit is unknown.

    >>> round(gpu("A100", power=300).peak("bf16") / gpu("A100").peak("bf16"), 3)
    0.909
    """
    if power is not None:
        return _limited(gpu(name), power)
    if isinstance(name, GPU):
        return name
    if not isinstance(name, str):
        raise SpecError(
            f"gpu={name!r} is a {type(name).__name__}; give the name of a GPU, such as 'T4', or a GPU "
            "object"
        )
    matches = _by_name().get(_plain(name))
    if not matches and (size := SIZE.fullmatch(name.strip())) and float(size[1]) > 0:
        return _of_memory(size)
    if not matches:
        if several := SEVERAL.fullmatch(name.strip()):
            number, one = several[1] or several[4], several[2] or several[3]
            if SIZE.fullmatch(one) or _by_name().get(_plain(one)):
                raise SpecError(f"{name!r} means {number} GPUs, but one is expected; give {one!r} and the degree of "
                                f"parallelism, for example dp={number} (or tp=, pp=, cp=); with `llmlab run` "
                                f"give --world-size {number}")  # fmt: skip
        other = (why for why, pattern in OTHER_BACKENDS.items() if re.fullmatch(pattern, _plain(name)))
        if why := next(other, None):
            raise NotAvailable(f"{name}: {why}, so its times and the memory outside of tensors are unknown. For the "
                               "sizes of tensors, give the memory that a program may use, such as 24GB")  # fmt: skip
        names = [alias for entry in gpus() for alias in (entry.name, *entry.aliases)]
        other_gpu = "for a GPU that is not listed, give its memory, such as 24GB"
        raise unknown_name("GPU", name, names, f"`llmlab gpus` lists all; {other_gpu}.")
    return matches[0]


def assumed_memory(name: GPU | str | None) -> tuple[Note, ...]:
    """Return a note if `name` does not determine the memory size of the GPU, as "A100" does not; else nothing. A name
    exactly as `gpus` has it does.

    >>> [str(note) for note in assumed_memory("v100")]
    ['v100 is taken to be V100-16GB. If yours has another memory size, give V100-32GB.']
    """
    if not isinstance(name, str) or name.lower() == "cpu":
        return ()
    device, words = gpu(name), _words(name)
    if size := SIZE.fullmatch(name.strip()):
        return (_memory_note(device, size),)
    if name == device.name:
        return ()
    variants: dict[int, str] = {}  # by GiB, because boards with the same memory hardly differ
    for variant in _sized(words):
        if abs(variant.memory - device.memory) > MEMORY_TOLERANCE / 5 * device.memory:
            variants.setdefault(variant.memory >> 30, variant.name)
    if not variants:
        return ()
    give = f"If yours has another memory size, give {' or '.join(variants.values())}"
    return (Note("gpu-memory-assumed", f"{name} is taken to be {device.name}. {give}."),)


def _sized(words: tuple[str, ...]) -> Iterator[GPU]:
    """Yield the GPUs whose name or alias consists of `words` followed by a memory size."""
    for entry in gpus():
        names = (_words(alias) for alias in (entry.name, *entry.aliases))
        if any(name[: len(words)] == words and re.match(r"\d+gb", (*name, "")[len(words)]) for name in names):
            yield entry


def _of_memory(size: re.Match[str]) -> GPU:
    """Return a GPU with this memory and no other figures. Its dtypes are those of the smallest one with bf16."""
    alike, number = _of_size(size), float(size[1])
    usual = min((entry for entry in alike if entry.supports_bf16), key=lambda entry: entry.memory, default=gpu("A100"))
    least = min((entry.memory for entry in alike), default=LEAST_SHARE * number * GiB)
    exact = size[2].lower() == "gib"
    return replace(
        usual, name=f"{size[1]}{'GiB' if exact else 'GB'}", memory=int(number * GiB if exact else least), nvlink=None,
        pcie=None, context=None, nccl=None, usd_per_hour=None, usd=None, prices=(), announced=None, aliases=(),
        sources={}, power=None,
    )  # fmt: skip


def _of_size(size: re.Match[str]) -> list[GPU]:
    """Return NVIDIA's GPUs that are sold with this memory size."""
    most = float(size[1]) * GiB
    return [entry for entry in gpus() if entry.vendor == "NVIDIA" and LEAST_SHARE * most < entry.memory <= most]


def _memory_note(device: GPU, size: re.Match[str]) -> Note:
    """Return a note on the assumed memory of a GPU that was named by its memory size."""
    names = ", ".join(entry.name for entry in sorted(_of_size(size), key=lambda entry: entry.memory))
    least = f", the least of the GPUs of that size ({names})" if names and device.name.endswith("GB") else ""
    seen = f"A program is taken to see {show_bytes(device.memory)} of memory{least}"
    return Note("gpu-memory-assumed", f"{seen}. Name the GPU if you know it.")


def _limited(device: GPU, watts: float) -> GPU:
    """Return the GPU under a power limit of `watts`."""
    if device.power is None:
        raise NotAvailable(f"power={watts:g} W: the power limit of {device.name} is unknown; leave out power")
    if not LEAST_POWER * device.power <= watts <= device.power:
        least = LEAST_POWER * device.power
        raise SpecError(f"power={watts:g} W for {device.name}: give {least:g} to {device.power:g} W; "
                        "clocks under a lower limit have not been measured")  # fmt: skip
    slower = (watts / device.power) ** (1 / 3)
    return replace(device, power=watts, peak_flops={dtype: slower * rate for dtype, rate in device.peak_flops.items()})


@cache
def clocks(device: GPU) -> float:
    """Return the clocks of a GPU under its power limit as a share of those in the table; 1 if it is not listed."""
    listed = next((entry for entry in gpus() if entry.name == device.name), None)
    return device.peak_flops["fp32"] / listed.peak_flops["fp32"] if listed else 1.0


@cache
def gpus() -> tuple[GPU, ...]:
    """Return every GPU in the table, oldest first."""
    table = read_table("gpus.toml")
    return tuple(_from_entry(entry, table["documents"]) for entry in table["gpu"])


def match(device_name: str, memory: int) -> GPU | None:
    """Return the GPU that a driver calls `device_name` and reports with `memory` bytes, or None.

    Some names belong to several GPUs (the RTX 3060 and 4060 Ti come in two sizes), so the memory must agree within 5 %.
    The name in the table may also contain the memory size.
    """
    for entry in (*_by_name().get(_plain(device_name), ()), *_sized(_words(device_name))):
        if abs(memory - entry.memory) <= MEMORY_TOLERANCE * entry.memory:
            return entry
    return None


@cache
def _by_name() -> dict[str, list[GPU]]:
    names: dict[str, list[GPU]] = {}
    for entry in gpus():
        for plain in dict.fromkeys(map(_plain, (entry.name, *entry.aliases))):
            names.setdefault(plain, []).append(entry)
    return names


def _plain(name: str) -> str:
    return "".join(_words(name))


def _words(name: str) -> tuple[str, ...]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return tuple(word for word in words if word not in ("nvidia", "amd", "tesla", "geforce", "instinct"))


def _from_entry(entry: Mapping[str, Any], documents: Mapping[str, str]) -> GPU:
    """Return the GPU of one table entry; a key of its sources may name several fields, and its peaks are in TFLOP/s."""
    values = values_of(entry, {"documents": documents})
    values["peak_flops"] = {dtype: rate * 1e12 for dtype, rate in values.pop("tflops").items()}
    sources = {name: cited(text, documents) for names, text in entry["sources"].items() for name in names.split()}
    prices = _prices().get(values["name"], ())
    for field_name, kinds in (("usd_per_hour", PRICES[:2]), ("usd", PRICES[2:])):
        if first := next((price for price in prices if price.kind in kinds), None):
            values[field_name], sources[field_name] = first.usd, first.source
    if "announced" in values:
        sources["announced"] = f"{values['vendor']}'s announcement, as generally known"
    return GPU(**{**values, "prices": prices, "sources": sources})


@cache
def _prices() -> dict[str, tuple[Price, ...]]:
    """Return every GPU's prices, in the order of prices.toml."""
    prices: dict[str, tuple[Price, ...]] = {}
    for entry in read_table("prices.toml")["list"]:
        for name, usd in entry["usd"].items():
            price = Price(entry["kind"], usd, entry["source"], entry.get("date"))
            prices[name] = (*prices.get(name, ()), price)
    return prices
