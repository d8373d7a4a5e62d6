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
# Majors, of Hopper and data-centre Blackwell, where SDPA takes cuDNN's kernel first (aten/src/ATen/native/transformers/
# cuda/sdp_utils.cpp, check_prefer_cudnn_attention).
CUDNN_ATTENTION_MAJORS = (9, 10)

# The same card's driver shows up to 3 % more or less (ECC, version, Windows); cards that share a name differ by more.
MEMORY_TOLERANCE = 0.05
# A program sees at least this share of the advertised memory: 0.91 on a T4, 0.92 on an A40, both with ECC.
LEAST_SHARE = 0.9
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)

PRICES = ("serverless", "rental", "purchase")
# Under a lower power limit a chip's clocks go as its cube root, because power goes as clocks times the voltage squared,
# which clocks need. Of large products that is what was measured within 10 %: A100s of 250 and 300 W reach 0.81 and 0.90
# of one of 400, where it says 0.85 and 0.91 (measured_rates.toml), an H100 PCIe of 350 W 0.63 of one of 700 with more
# multiprocessors, where it says 0.69. A GB300 at 500 of 1400 W reached 0.28 to 0.39, not 0.71
# (facebookexperimental/triton, pull request 2023): below half the limit it does not hold.
LEAST_POWER = 0.5


@dataclass(frozen=True)
class Price:
    """What one GPU costs, in US dollars: an hour of it ("serverless", "rental") or the card ("purchase"); see
    prices.toml. `date` is ISO; None of a source without one."""

    kind: str
    usd: float
    source: str
    date: str | None = None


@dataclass(frozen=True, repr=False)
class GPU:
    """One accelerator. Rates are dense (no 2:4 sparsity) and theoretical; None: the chip lacks it, or it is not known.

    `memory`: bytes that a program sees (the driver's total). `bandwidth`: bytes/s of device memory. `peak_flops`:
    FLOP/s (int8: op/s) by dtype, one of `DTYPES`. `sms`: multiprocessors (AMD: compute units). `nvlink` (AMD: Infinity
    Fabric), `pcie`: bytes/s in one direction. `power`: W that it may take. `context`, `nccl`: bytes that the CUDA
    context and, with several ranks, NCCL take outside the allocator. `cublas_workspace`: bytes each cuBLAS handle takes
    from the allocator.
    `announced`: the year and month, "2022-03". `node_gpus`: GPUs of the node it is usually sold in. `peer_access`:
    through PCIe. `prices` age, each has its date; `usd_per_hour` and `usd` are the first of an hour and of a card.
    `checked` (ISO date) is of the other figures, `sources` are by field.
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
        """Return the bytes outside the allocator in one process of `ranks`; None where a part is not known."""
        parts = (self.context,) if ranks == 1 else (self.context, self.nccl)
        return None if None in parts else sum(part for part in parts if part)

    def room(self, ranks: int = 1) -> int:
        """Return the bytes that are left for the allocator; an unknown part outside it counts as 0."""
        return self.memory - (self.context or 0) - (self.nccl or 0 if ranks > 1 else 0)

    def peak(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s for `dtype`, or None where the chip has no units for it."""
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
        """Whether FlashAttention-2 runs: NVIDIA from Ampere on (compute capability 8.0), AMD's CDNA."""
        if self.compute_capability is None:
            return self.vendor == "AMD"
        return self.compute_capability >= FLASH_ATTENTION_2_CAPABILITY

    @property
    def prefers_cudnn_attention(self) -> bool:
        """Whether SDPA takes cuDNN's kernel before FlashAttention; not where the capability is not known."""
        return self.compute_capability is not None and self.compute_capability[0] in CUDNN_ATTENTION_MAJORS

    def __str__(self) -> str:
        return f"{self.name} ({self.vendor} {self.architecture}, {show_bytes(self.memory)})"

    def __repr__(self) -> str:
        return f"<GPU: {self}>"


def gpu(name: str | GPU, power: float | None = None) -> GPU:
    """Return the card called `name`: "T4", "a100", "rtx 4090", or what torch calls it, "NVIDIA A100-SXM4-80GB".

    Case, spaces, hyphens and the words NVIDIA, AMD, Tesla, GeForce and Instinct do not count. Without a size or a form
    "a100" is the A100-80GB, "v100" the V100-16GB, and a data-centre card the SXM board. A `GPU` is returned as it is.
    "48GB" is a GPU of that advertised memory, with as little as any of them shows a program; "44.5GiB" has exactly so
    much. Times on it are unknown. Any other name that is not in the table raises UnknownName (a LookupError): the
    figures of a similar card would be wrong.

    `power`: W of a limit below the card's own, under which its clocks, and so its peaks, are lower; no less than half.
    Raises NotAvailable for a card whose own limit is not known.

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
    found = _by_name().get(_plain(name))
    if not found and (size := SIZE.fullmatch(name.strip())):
        return _of_memory(size)
    if not found:
        if (several := re.fullmatch(r"(\d+)\s*x\s*(.+)", name, re.IGNORECASE)) and _by_name().get(_plain(several[2])):
            raise SpecError(f"{name!r} means {several[1]} GPUs, but one is expected; give {several[2]!r}, and set the "
                            f"number of GPUs with dp, tp, pp or cp: for example dp={several[1]}")  # fmt: skip
        known = [called for card in gpus() for called in (card.name, *card.aliases)]
        raise unknown_name("GPU", name, known, "`llmlab gpus` lists all; of another GPU give the memory, such as 24GB.")
    return found[0]


def assumed_memory(name: GPU | str | None) -> tuple[Note, ...]:
    """Return a note where `name` leaves open which of several memories the GPU has, as "A100" does; else nothing.

    >>> [str(note) for note in assumed_memory("v100")]
    ['v100 is taken to be V100-16GB. If yours has another memory size, give V100-32GB.']
    """
    if not isinstance(name, str) or name.lower() == "cpu":
        return ()
    card, words = gpu(name), _words(name)
    if size := SIZE.fullmatch(name.strip()):
        return (_memory_note(card, size),)
    others: dict[int, str] = {}  # by GiB: boards of one memory differ in little else
    for each in _sized(words):
        if abs(each.memory - card.memory) > MEMORY_TOLERANCE / 5 * card.memory:
            others.setdefault(each.memory >> 30, each.name)
    if not others:
        return ()
    give = f"If yours has another memory size, give {' or '.join(others.values())}"
    return (Note("gpu-memory-assumed", f"{name} is taken to be {card.name}. {give}."),)


def _sized(words: tuple[str, ...]) -> Iterator[GPU]:
    """Yield the GPUs whose name, or one of whose aliases, is `words` and a size of memory."""
    for card in gpus():
        named = (_words(called) for called in (card.name, *card.aliases))
        if any(other[: len(words)] == words and re.match(r"\d+gb", (*other, "")[len(words)]) for other in named):
            yield card


def _of_memory(size: re.Match[str]) -> GPU:
    """Return a GPU of which only the memory is known. Dtypes are those of the one with least memory that has bf16."""
    alike, number = _of_size(size), float(size[1])
    usual = min((card for card in alike if card.supports_bf16), key=lambda card: card.memory, default=gpu("A100"))
    least = min((card.memory for card in alike), default=LEAST_SHARE * number * GiB)
    exact = size[2].lower() == "gib"
    return replace(
        usual, name=f"{size[1]}{'GiB' if exact else 'GB'}", memory=int(number * GiB if exact else least), nvlink=None,
        pcie=None, context=None, nccl=None, usd_per_hour=None, usd=None, prices=(), announced=None, aliases=(),
        sources={}, power=None,
    )  # fmt: skip


def _of_size(size: re.Match[str]) -> list[GPU]:
    """Return NVIDIA's GPUs that are sold with so much memory."""
    most = float(size[1]) * GiB
    return [card for card in gpus() if card.vendor == "NVIDIA" and LEAST_SHARE * most < card.memory <= most]


def _memory_note(card: GPU, size: re.Match[str]) -> Note:
    """Say which memory a GPU has that was named by it."""
    names = ", ".join(card.name for card in sorted(_of_size(size), key=lambda card: card.memory))
    least = f", the least of the GPUs of that size ({names})" if names and card.name.endswith("GB") else ""
    seen = f"A program is taken to see {show_bytes(card.memory)} of memory{least}"
    return Note("gpu-memory-assumed", f"{seen}. Name the GPU if you know it.")


def _limited(card: GPU, watts: float) -> GPU:
    """Return the card under a limit of `watts`."""
    if card.power is None:
        raise NotAvailable(f"power={watts:g} W: the power limit of {card.name} is unknown; leave out power")
    if not LEAST_POWER * card.power <= watts <= card.power:
        raise SpecError(f"power={watts:g} W for {card.name}: give {LEAST_POWER * card.power:g} to {card.power:g} W; "
                        "clocks under a lower limit have not been measured")  # fmt: skip
    slower = (watts / card.power) ** (1 / 3)
    return replace(card, power=watts, peak_flops={dtype: slower * rate for dtype, rate in card.peak_flops.items()})


@cache
def clocks(card: GPU) -> float:
    """Return the share of its clocks that a power limit leaves a card of the table; 1 of one that is not in it."""
    own = next((each for each in gpus() if each.name == card.name), None)
    return card.peak_flops["fp32"] / own.peak_flops["fp32"] if own else 1.0


@cache
def gpus() -> tuple[GPU, ...]:
    """Return every card of the table, in its order: oldest first."""
    table = read_table("gpus.toml")
    return tuple(_card(entry, table["documents"]) for entry in table["gpu"])


def match(device_name: str, memory: int) -> GPU | None:
    """Return the card whose driver calls it `device_name` and shows `memory` bytes, or None.

    Some names belong to several cards (the RTX 3060 and 4060 Ti come in two sizes): memory must agree within 5 %, and a
    card may have its size in its name here.
    """
    for card in (*_by_name().get(_plain(device_name), ()), *_sized(_words(device_name))):
        if abs(memory - card.memory) <= MEMORY_TOLERANCE * card.memory:
            return card
    return None


@cache
def _by_name() -> dict[str, list[GPU]]:
    names: dict[str, list[GPU]] = {}
    for card in gpus():
        for plain in dict.fromkeys(map(_plain, (card.name, *card.aliases))):
            names.setdefault(plain, []).append(card)
    return names


def _plain(name: str) -> str:
    return "".join(_words(name))


def _words(name: str) -> tuple[str, ...]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return tuple(word for word in words if word not in ("nvidia", "amd", "tesla", "geforce", "instinct"))


def _card(entry: Mapping[str, Any], documents: Mapping[str, str]) -> GPU:
    """Return the card of one table entry, whose sources are by field, several in a key, and whose peaks in TFLOP/s."""
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
    """Return every card's prices, in the order of prices.toml."""
    found: dict[str, tuple[Price, ...]] = {}
    for entry in read_table("prices.toml")["list"]:
        for name, usd in entry["usd"].items():
            price = Price(entry["kind"], usd, entry["source"], entry.get("date"))
            found[name] = (*found.get(name, ()), price)
    return found
