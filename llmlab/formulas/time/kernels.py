"""How long a card's kernels take in a training step, and where that is known from.

Four origins, the best that there is for a card:

    measured      its own grids (hardware/kernel_tables.py) fitted        rates that records of whole steps gave: the
    T4's (hardware/efficiencies.toml) transferred   the grids of a card with the same units, each time scaled: where
    FLOP take longer by the ratio of what large products reach (hardware/measured_rates.toml), or of peaks, where bytes
    do by that of bandwidths; none is faster than those large products data sheet    its peaks and bandwidth, times the
    share that measured cards reach of theirs

Bytes outside of those kernels go at the rate of records, else at a share of what a copy reaches (`copy_share`), else of
the data sheet's bandwidth.

Kernels are measured one at a time, in bursts; in a step that lasts, the card's power limit holds its clocks back: no
kernel multiplies faster than a share of the peak, one per chip and dtype (`lasting`), where steps that last were
published. It, the other shares and the spreads are in hardware/training.toml.

    >>> kernels("A100-40GB").origin
    'transferred from A100-80GB by the ratio of measured rates of large matmuls'
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from math import exp, log, prod
from statistics import median
from typing import Any

from ...hardware.gpu import GPU, clocks
from ...hardware.gpu import gpu as find_gpu
from ...hardware.kernel_tables import KernelTable, KernelTime, kernel_table
from ...hardware.links import Group, node_link
from ...hardware.tables import read_table
from . import communication
from .efficiency import Efficiency, efficiency

LAUNCH = 2e-6  # s of an empty kernel
LARGE = (8192, 8192, 8192)  # a product that is bound by FLOP on every card
# Chips from this capability on have attention wait for exponentials and for shared memory, not for the units that power
# holds back (FlashAttention-4, arXiv 2603.05451, section 1): its time is as measured.
BOUND_BY_EXPONENTIALS = (10, 0)
# Products in fp8 that are far from square, whose times say what casting the first matrix takes.
CASTING = tuple((m, n, k) for m in (8192, 16384, 32768) for n in (256, 512, 1024) for k in (4096, 8192))
MEASURED_AS = {"fp16": "bf16", "mxfp8": "fp8"}  # by dtype, whose grid has its times
BURSTS = (4096, 8192)  # rows of square products, of which the fastest is at the clocks of a burst
# FlashAttention's backward pass is five products to forward's two, and reaches up to 63 % of an A100's peak where
# forward reaches up to 73 % (arXiv 2307.08691, section 1).
BACKWARD = 2.5 * 0.73 / 0.63
TIMED = 16384, 2048  # tokens, and heads × head size, of all that FlashAttention 2's author timed (training.toml)
SLOWER = {"MI350X": "MI355X"}  # boards of less power, whose products nobody published
HOST = "A100-80GB"  # whose host's times stand for those that nobody measured


@dataclass(frozen=True, eq=False)
class Kernels:
    """Seconds of kernels on `card`. `table` is measured on `base`, the card itself or one like it; `rates` are fitted,
    and win where they have the dtype and there is no table. `kind` is one of the origins above."""

    card: GPU
    kind: str
    table: KernelTable | None
    base: GPU
    rates: Efficiency | None
    host: Efficiency
    bandwidth: float
    shares: dict[str, float]
    sustained: float  # share of the peak in half precision that lasts
    sustained_fp8: float  # and in fp8
    spread: float
    reached: float | None  # FLOP/s that others measured of large products in half precision; None with own grids
    flash: dict[str, dict[str, float]]  # 10^12 FLOP/s of AMD's libraries (measured_rates.toml)
    scale: float  # what a FLOP takes on `card` over what it takes on `base`
    _products: dict[tuple[int, int, int, str], tuple[float | None, bool]] = field(default_factory=dict)
    _attentions: dict[tuple[int, int, int, int, str], float] = field(default_factory=dict)
    _known_limits: dict[str, tuple[float | None, float, int] | None] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """Where the times of products and attention are from, in words."""
        if clocks(self.card) < 1:
            own = replace(self, card=find_gpu(self.card.name))
            return f"{own.origin}, at {self.card.power:g} of {own.card.power:g} W"
        if self.kind == "transferred" and self.base.name != self.card.name:
            how = "measured rates of large matmuls" if self.reached else "data sheets"
            return f"transferred from {self.base.name} by the ratio of {how}"
        if self.table:
            return f"measured on {self.card.name}"
        if self.rates:
            return f"fitted to {self.rates.derived_from}"
        if self.reached:
            return f"large matmuls at {self.reached / 1e12:.0f} TFLOP/s (measured_rates.toml)"
        return f"{self.shares['products']:.0%} of the data sheet"

    @cached_property
    def sources(self) -> dict[str, str]:
        """Where the rates are from that each part of a step's time follows from (`timing.PARTS`), in words."""
        lasting = f", at most {self.sustained:.0%} of the peak" if self.sustained < 1 else ""
        if self.sustained_fp8 != self.sustained:
            lasting += f", {self.sustained_fp8:.0%} in fp8"
        slower = f", at {self.clocks:.0%} of their clocks or more" if self.clocks < 1 else ""
        products, attention, links = self.origin, self.origin, "links.toml"
        if self.table:
            one = self.table.attentions["bf16"]
            products += f" ({', '.join(self.table.matmuls['bf16'].measured_by)}){lasting}"
            attention += f" ({one.kernel}, {', '.join(one.measured_by)}){slower}"
            if "all-reduce" in self.table.collectives:
                nccl = ", ".join(self.table.collectives["all-reduce"].measured_by)
                links = f"inside a node {self.origin} ({nccl}), else links.toml" if self._joined else links
        elif self.flash:
            at = {kind: f"{rates['forward']:.0f}" for kind, rates in self.flash.items()}
            narrow = f" ({at['sdpa-64']} with heads of 64)" if "sdpa-64" in at else ""
            attention = f"SDPA at {at['sdpa']} TFLOP/s{narrow}, Composable Kernel at {at['ck']} (measured_rates.toml)"
        elif self.rates is None:
            attention = f"{self.shares['attention']:.0%} of the data sheet"
        if not self.table and self.reached and self.card.peak("fp8"):
            products += ", in fp8 as much more as its peak is"
        if self.card.pcie and node_link(self.card).kind == "pcie":
            links = "inside a node as published ones (pcie_nodes.toml), else links.toml"
        reached = "fitted to records" if self.rates else f"{self.bandwidth / self.card.bandwidth:.0%} of the data sheet"
        moved = f"bytes at {self.bandwidth / 1e9:,.0f} GB/s, {reached}"
        sent = dict.fromkeys(("tensor", "context", "experts", "pipeline", "data"), links)
        return {
            "products": products,
            "attention": attention,
            "elementwise": moved,
            "launches": f"the host of a {self.host.gpu}",
            "optimizer": moved,
            "offload": "nodes.toml",
            "bubble": "stages that wait for others",
            "scale": "published weak scaling",
            **sent,
        }

    @cached_property
    def operators(self) -> Efficiency:
        """Rates of single operators and what the CPU takes to start them: the card's own, else those of `HOST` with the
        bytes at this card's bandwidth."""
        if self.rates and self.rates.dispatch:
            return self.rates
        like = self.host
        faster = self.bandwidth / like.bandwidth
        return replace(
            like, gpu=self.card.name, sms=self.card.sms or like.sms, bandwidth=self.bandwidth,
            strided=faster * like.strided, gather=faster * like.gather,
        )  # fmt: skip

    def slower(self, kernel: str, length: int, head_size: int) -> float:
        """Return how much longer `kernel` takes than the measured attention, which is that of an engine that serves,
        with keys and values in pages, and on Hopper FlashAttention 3, as fast as which cuDNN's is."""
        if kernel == "cudnn":
            return 1.0
        times = self.shares["efficient"] if kernel == "efficient" else 1.0
        return times * _flash_over_measured(self.base.name, length, head_size) if self.table else times

    @property
    def interval(self) -> float:
        """What 8 in 10 times of a step on one device are off at most, as a factor."""
        return exp(self.spread)

    def backward(self, kernel: str, head_size: int = 128) -> float:
        """Return the seconds of fused attention's backward pass over those of its forward pass, by `kernel`."""
        if self.flash:
            rates = self._flash(kernel, head_size)
            return 2.5 * rates["forward"] / rates["backward"]
        return 2.5 if self._fitted("attention") else BACKWARD

    def _flash(self, kernel: str, head_size: int) -> dict[str, float]:
        kind = "ck" if kernel == "ck" else "sdpa"
        narrow = self.flash.get(f"{kind}-64") if head_size <= 64 else None
        return narrow or self.flash[kind]

    def _fitted(self, what: str) -> bool:
        return self.table is None and self.rates is not None and bool(getattr(self.rates, what))

    @cached_property
    def clocks(self) -> float:
        """Clocks that last over those of bursts, at which attention was measured: what products reach in steps that
        last over the most that they reach alone; 1 where nothing says that power limits it."""
        newest = (self.card.compute_capability or (0, 0)) >= BOUND_BY_EXPONENTIALS
        if self.sustained == 1 or newest or not self.table:
            return 1.0
        peak = self.card.peak("bf16")
        assert peak
        return min(1.0, self.sustained * peak * self.scale / _burst(self.base.name))

    def lasting(self, rate: float) -> float:
        """Return the share of a burst's clocks at which a kernel lasts that computes `rate` FLOP/s in a burst.

        Power goes as what is computed in a cycle and as the cube of the clocks: what computes half as much as the
        fastest product goes on at clocks a quarter higher, and FlashAttention 2 on an H100 as in a burst. NeMo
        24.03.01, whose launcher turns cuDNN's attention off, took as long with 16,384 to 131,072 tokens as follows from
        its author's rates. Boards made for less power than the measured one show none of that in published steps
        (torchtitan's of 32,768 tokens and more, on H100s of 500 W)."""
        if find_gpu(self.card.name).power != self.base.power:
            return self.clocks
        return min(1.0, self.clocks * (_burst(self.base.name) / rate) ** (1 / 3))

    def measured(self, dtype: str) -> bool:
        """Return whether products in `dtype` were measured, on the card or the one that it is transferred from."""
        return self.table is not None and MEASURED_AS.get(dtype, dtype) in self.table.matmuls

    @property
    def longest(self) -> int | None:
        """The longest sequence whose attention was measured, in tokens; None where none was."""
        return self.table.attentions["bf16"].grid.axes[1][-1] if self.table else None

    def extrapolates(self, m: int, n: int, k: int, dtype: str) -> bool:
        """Return whether a product's time is extrapolated: its dtype was measured, but not at such sizes."""
        return self.timed(m, n, k, dtype)[1]

    def product(self, m: int, n: int, k: int, dtype: str) -> float | None:
        """Return the seconds of (m, k) · (k, n) in `dtype`; None for one that the card has no units for. "mxfp8" is fp8
        with a scale per 32 elements."""
        return self.timed(m, n, k, dtype)[0]

    def timed(self, m: int, n: int, k: int, dtype: str) -> tuple[float | None, bool]:
        """Return what `product` and `extrapolates` do, worked out once."""
        key = m, n, k, dtype
        try:
            return self._products[key]
        except KeyError:
            time = _matmul(self.base.name, m, n, k, MEASURED_AS.get(dtype, dtype)) if self.table else None
            extrapolated = time is not None and not time.inside
            return self._products.setdefault(key, (self._product(m, n, k, dtype, time), extrapolated))

    def summed(self, sizes: tuple[tuple[tuple[int, int, int, str], int], ...]) -> tuple[float | None, float]:
        """Return the seconds of products (m, n, k, dtype), each so many times, and those that are extrapolated; None
        where the card has no units for one of them."""
        total = beyond = 0.0
        for key, times in sizes:
            one, extrapolated = self._products.get(key) or self.timed(*key)
            if one is None:
                return None, 0.0
            total += times * one
            if extrapolated:
                beyond += times * one
        return total, beyond

    def _product(self, m: int, n: int, k: int, dtype: str, time: KernelTime | None) -> float | None:
        flop = 2.0 * m * n * k
        if dtype == "mxfp8":
            seconds = self.product(m, n, k, "fp8")
            return seconds and seconds * training_rates()["fp8"]["mxfp8"]
        if self.table is None and self._fitted("matmul") and self.rates and dtype in self.rates.matmul:
            return flop / self.rates.matmul[dtype]
        limits = self._limits(dtype)
        if limits is None:
            return None
        most, rate, width = limits
        least = flop / most if most else 0.0
        moved = float(width * (m * k + k * n) + max(width, 2) * m * n)
        if time:
            seconds = time.seconds
            if dtype == "fp8":  # casts are counted with what else moves bytes (elementwise.FP8_CASTS)
                theirs = self.base.peak(dtype)
                assert theirs
                seconds = max(seconds - m * k * _cast_seconds(self.base.name), flop / theirs)
            return max(least, self._scaled(seconds, flop, moved, dtype))
        return LAUNCH + max(least, flop / rate, moved / self.bandwidth)

    def _limits(self, dtype: str) -> tuple[float | None, float, int] | None:
        """Return FLOP/s that no product in `dtype` passes in a step that lasts (None: nothing says so), and those of a
        large one that was not measured, and the bytes of an element; None where the card has no units for it."""
        if dtype in self._known_limits:
            return self._known_limits[dtype]
        limits = None
        if (peak := self.card.peak(dtype)) is not None:
            lasting = self.sustained_fp8 if dtype == "fp8" else self.sustained
            most, rate = peak * lasting if lasting < 1 else None, self.shares["products"] * peak
            if self.reached and dtype != "fp32":  # fp8 of the same share as halves
                rate = self.reached * peak / (self.card.peak("bf16") or peak)
                most = min(most, rate) if most else rate
            limits = most, rate, {"fp32": 4, "fp8": 1}.get(dtype, 2)
        return self._known_limits.setdefault(dtype, limits)

    def _scaled(self, seconds: float, flop: float, moved: float, dtype: str) -> float:
        """Return the time on this card of a kernel that took `seconds` on the card that the table is of."""
        if self.base is self.card:
            return seconds
        theirs = self.base.peak(dtype)
        assert theirs
        computed, read = flop / theirs, moved / self.base.bandwidth
        return seconds * max(computed * self.scale, moved / self.card.bandwidth) / max(computed, read)

    def attention(self, batch: int, heads: int, length: int, head_size: int, kernel: str, dtype: str) -> float:
        """Return the seconds of fused causal attention's forward pass: SDPA's FlashAttention 2 ("flash"), cuDNN's
        ("cudnn"), as fast as FlashAttention 3 (arXiv 2407.08608, figure 5), the memory-efficient kernel ("efficient"),
        which takes as much longer as FlashAttention's first version did, or on AMD's Composable Kernel ("ck")."""
        key = batch * heads, length, head_size, 0, kernel + dtype
        if key not in self._attentions:
            self._attentions[key] = self._attention(batch * heads, length, head_size, kernel, dtype)
        return self._attentions[key]

    def _attention(self, heads: int, length: int, head_size: int, kernel: str, dtype: str) -> float:
        flop = 2.0 * heads * length * length * head_size  # of two products, the half that is not masked
        if self._fitted("attention") and self.rates and dtype in self.rates.attention:
            return flop / self.rates.attention[dtype]
        slower = self.slower(kernel, length, head_size)
        time = self.table and dtype != "fp32" and self.table.attention(1, heads, length, head_size)
        if time and self.table:
            moved = 8.0 * heads * length * head_size
            lasting = self.lasting(flop / slower / time.seconds)
            return slower * self._scaled(time.seconds, flop, moved, "bf16") / lasting
        if self.flash and dtype != "fp32":
            return LAUNCH + slower * flop / (1e12 * self._flash(kernel, head_size)["forward"])
        peak = self.card.peak(dtype) or self.card.peak("fp16") or self.card.peak_flops["fp32"]
        if self.reached and dtype != "fp32":
            peak = self.reached / self.shares["products"]
        return LAUNCH + slower * flop / (self.shares["attention"] * peak)

    def collective(self, operation: str, size: float, group: Group) -> float:
        """Return the seconds of a collective of `size` bytes: measured inside a node, where the ranks are joined as
        those were and reach no rate of their own, else by the links."""
        link = group.inside
        joined = group.across is None and group.ranks > 1 and (link.bandwidth, link.reached) == self._joined
        # Measured was with the switches' help, where there are some.
        alike = operation != "all-reduce" or bool(group.inside.switched) == self._adding
        if self.table and joined and alike:
            time = _collective(self.base.name, operation, int(size) or 1, group.ranks)
            if time:
                return time.seconds
        return _linked(operation, size, group)

    @cached_property
    def _adding(self) -> bool:
        """Whether the switches of the base's nodes add, in an all-reduce (NVLink SHARP)."""
        return bool(node_link(self.base).switched)

    @cached_property
    def _joined(self) -> tuple[float, float] | None:
        """Bytes/s of the NVLink with which collectives were measured for this card, its own or the same: the data
        sheet's and those reached."""
        if self.card.nvlink is None or self.base.nvlink != self.card.nvlink:
            return None
        link = node_link(self.card)
        return link.bandwidth, link.reached


@lru_cache(maxsize=1 << 12)
def _flash_over_measured(gpu: str, length: int, head_size: int) -> float:
    """Return how much longer FlashAttention 2 takes than the attention that was measured on `gpu`, by its author's
    rates, between whose lengths the logarithm of the length counts; 1 on chips for which there are none."""
    table, timed = kernel_table(gpu), training_rates()["flash_attention_2"]
    rates = timed.get("{}.{}".format(*(find_gpu(gpu).compute_capability or (0, 0))))
    if table is None or rates is None:
        return 1.0
    size = min(rates, key=lambda width: abs(int(width) - head_size))
    lengths = timed["lengths"]
    at = min(max(length, lengths[0]), lengths[-1])
    i = min(bisect_right(lengths, at), len(lengths) - 1)
    share = log(at / lengths[i - 1]) / log(lengths[i] / lengths[i - 1])
    rate = 1e12 * (rates[size][i - 1] * (1 - share) + rates[size][i] * share)
    tokens, width = TIMED
    forward = 3.5 * 2.0 * tokens * at * width / rate / (1 + BACKWARD)  # the author counts 2.5 forwards for backward
    measured = table.attention(1, round(tokens / at * width / int(size)), at, int(size))
    return forward / measured.seconds if measured else 1.0


@lru_cache(maxsize=1 << 17)
def _matmul(gpu: str, m: int, n: int, k: int, dtype: str) -> KernelTime | None:
    """Return the measured time of a product; one lookup for all cards that it is transferred to."""
    table = kernel_table(gpu)
    return table.matmul(m, n, k, dtype) if table else None


# Cards of one table, and such as the same links join, are asked for the same messages in a run on each.
@lru_cache(maxsize=1 << 12)
def _collective(gpu: str, operation: str, size: int, ranks: int) -> KernelTime | None:
    table = kernel_table(gpu)
    return table.collective(operation, size, ranks) if table else None


_linked = lru_cache(maxsize=1 << 12)(communication.seconds)


@cache
def _burst(gpu: str) -> float:
    """Return the FLOP/s of the fastest square product, at the clocks of a burst."""
    bursts = [_matmul(gpu, m, m, m, "bf16") for m in BURSTS]
    return max(2.0 * m**3 / time.seconds for m, time in zip(BURSTS, bursts, strict=True) if time)


@cache
def _cast_seconds(gpu: str) -> float:
    """Return the seconds per element that the measured products in fp8 take to cast their first matrix, as serving does
    in each step: what (m, k) · (k, n) takes longer than (n, k) · (k, m), which in bf16 takes as long."""
    times = {sizes: _matmul(gpu, *sizes, "fp8") for m, n, k in CASTING for sizes in ((m, n, k), (n, m, k))}
    known = {sizes: time.seconds for sizes, time in times.items() if time}
    return median((known[m, n, k] - known[n, m, k]) / ((m - n) * k) for m, n, k in CASTING)


def _reached(card: GPU) -> float | None:
    """Return the FLOP/s that others measured of large products in half precision on `card`; of AMD's MI350X, which is a
    MI355X of 1000 W, the share of its peak that was measured on that."""
    table, sources = read_table("measured_rates.toml"), ("zzc0721", "ROCm", "stas00", "chsasank", "mli")
    like = find_gpu(SLOWER.get(card.name, card.name))
    rate = next((table[by][like.name] for by in sources if like.name in table[by]), None)
    mine, theirs = find_gpu(card.name).peak("bf16"), like.peak("bf16")
    return 1e12 * rate * clocks(card) * (mine / theirs if mine and theirs else 1.0) if rate else None


@cache
def copy_share(card: GPU) -> float | None:
    """Return the share of the data sheet's bandwidth that a copy reaches on `card`: its own (measured_rates.toml), else
    the median of cards of its compute capability, whose memory is of one kind; None where there is none."""
    rates = read_table("measured_rates.toml")["copies"]
    shares = {find_gpu(name): 1e9 * rate / find_gpu(name).bandwidth for name, rate in rates.items()}
    own = [share for gpu, share in shares.items() if gpu.name == card.name]
    alike = [share for gpu, share in shares.items() if gpu.compute_capability == card.compute_capability]
    return median(own or alike) if alike else None


def _flash(card: GPU) -> dict[str, dict[str, float]]:
    """Return what fused attention reaches on chips of other makers, by library and by pass; empty for NVIDIA's."""
    rates, share = read_table("measured_rates.toml")["attention"], clocks(card)
    return {
        kind: {part: share * rate for part, rate in by[card.architecture].items()}
        for kind, by in rates.items() if card.architecture in by
    }  # fmt: skip


def _scale(card: GPU, base: GPU, reached: float | None) -> float:
    """Return how much longer a FLOP takes on `card` than on `base`, both in half precision: by what large products
    reach, else by the peaks."""
    large = _matmul(base.name, *LARGE, "bf16")
    if reached and large:
        return 2 * prod(LARGE) / large.seconds / reached
    theirs, mine = (each.peak("bf16") or each.peak("fp16") or each.peak("fp32") for each in (base, card))
    return theirs / mine if theirs and mine else 1.0


@cache
def training_rates() -> dict[str, Any]:
    """Return the table of what steps that last reach: shares, factors and spreads."""
    return read_table("training.toml")


@cache
def kernels(card: GPU | str) -> Kernels:
    """Return how long kernels take on a card of the table."""
    data_sheet, shared = find_gpu(card), training_rates()
    rates, base = efficiency(data_sheet), _base(data_sheet)
    table = kernel_table(base.name) if base else None
    kind = "data sheet" if not (table or rates) else "fitted" if not table else "measured"
    if base and base is not data_sheet:
        kind = "transferred"
    copied, share = copy_share(data_sheet), shared["share"]
    moved = share["bandwidth"] if copied is None else share["copied"] * copied
    host, reached = efficiency(HOST), None if base and base.name == data_sheet.name else _reached(data_sheet)
    assert host
    sustained = _sustained(data_sheet, base)
    return Kernels(
        card=data_sheet,
        kind=kind,
        table=table,
        base=base or data_sheet,
        rates=rates,
        host=rates if rates and rates.dispatch else host,
        bandwidth=rates.bandwidth if rates else moved * data_sheet.bandwidth,
        shares=share,
        sustained=sustained,
        sustained_fp8=min(1.0, sustained * shared["fp8"].get(str(int(_capability(data_sheet))), 1.0)),
        spread=shared["spread"][_nearness(data_sheet, base, kind)],
        reached=reached,
        flash=_flash(data_sheet),
        scale=_scale(data_sheet, base, reached) if base and base is not data_sheet else 1.0,
    )


def _sustained(card: GPU, base: GPU | None) -> float:
    """Return the share of the peak that power leaves in a step that lasts, by compute capability; 1 of chips whose
    steps nobody published, and where the card's units (an H20's) are the narrower limit."""
    share: float = training_rates()["sustained"].get("{}.{}".format(*(card.compute_capability or (0, 0))), 1.0)
    if base is None:
        return 1.0
    theirs, mine = base.peak("bf16"), card.peak("bf16")
    return 1.0 if theirs and mine and mine < share * theirs else share


def _nearness(card: GPU, base: GPU | None, kind: str) -> str:
    """Return the name of the spread: of a maker, of the kind, or, of grids of another architecture, of data sheets."""
    if card.vendor == "AMD":
        return "AMD"
    return "data sheet" if base and base.architecture != card.architecture else kind


def _base(card: GPU) -> GPU | None:
    """Return the card whose grids stand for `card`: its own (without a power limit), else those of one of the same
    compute capability, else of the same architecture, else of the nearest capability, and of several the nearest in
    bandwidth; None for other makers' cards, and where the card's own steps were fitted."""
    if kernel_table(card.name):
        return card if clocks(card) == 1 else find_gpu(card.name)
    if card.vendor != "NVIDIA" or efficiency(card):
        return None

    def distance(other: GPU) -> tuple[bool, bool, float, float]:
        distance = abs(_capability(other) - _capability(card))
        return distance > 0, other.architecture != card.architecture, distance, abs(other.bandwidth - card.bandwidth)

    return min(map(find_gpu, training_rates()["measured"]), key=distance)


def _capability(card: GPU) -> float:
    major, minor = card.compute_capability or (0, 0)
    return major + minor / 10
