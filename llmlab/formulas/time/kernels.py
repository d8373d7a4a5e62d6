"""The times of a GPU's kernels in a training step, and the source of each.

Every GPU uses the best of four origins that exists for it:

    measured      its own grids (hardware/kernel_tables.py)
    fitted        rates fitted to records of whole steps: the T4's (hardware/efficiencies.toml)
    transferred   the grids of a similar GPU, with every time scaled: where FLOP take longer than bytes, by the ratio of
                  the rates of large matmuls (hardware/measured_rates.toml) or of the peaks, else by the ratio of the
                  bandwidths; no matmul is faster than those large ones
    data sheet    its peaks and bandwidth, times the share of theirs that measured GPUs reach

The bytes of all other kernels move at the rate fitted to records, or else at a share of the rate of a copy
(`copy_share`), or else at a share of the data sheet's bandwidth.

Kernels are measured one at a time, in short bursts. In a long step, the power limit lowers the clocks, so no matmul
exceeds a share of the peak. There is one share per chip and dtype (`sustained`, `sustained_fp8`), for chips with
published long steps. These shares, the others and the spreads are in hardware/training.toml.

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
LARGE = (8192, 8192, 8192)  # (m, n, k) of a matmul that is limited by FLOP on every GPU
# On chips of this compute capability or newer, attention is limited by exponentials and shared memory, and not by the
# matmul units that the power limit slows down (FlashAttention-4, arXiv 2603.05451, section 1), so its time is as
# measured.
BOUND_BY_EXPONENTIALS = (10, 0)
# (m, n, k) of fp8 matmuls far from square, whose times show how long casting the first matrix takes.
CASTING = tuple((m, n, k) for m in (8192, 16384, 32768) for n in (256, 512, 1024) for k in (4096, 8192))
MEASURED_AS = {"fp16": "bf16", "mxfp8": "fp8"}  # the dtype whose grid serves for this one, too
BURSTS = (4096, 8192)  # rows of square matmuls; the faster one shows the rate of a burst
# FlashAttention's backward pass has five matmuls, and its forward pass two. They reach up to 63 % and 73 % of an A100's
# peak (arXiv 2307.08691, section 1).
BACKWARD = 2.5 * 0.73 / 0.63
TIMED = 16384, 2048  # tokens, and heads × head size, in all timings by FlashAttention 2's author (training.toml)
SLOWER = {"MI350X": "MI355X"}  # a board without published matmul rates: the same chip with more power
HOST = "A100-80GB"  # the GPU whose host represents hosts that nobody measured


@dataclass(frozen=True, eq=False)
class Kernels:
    """Seconds of kernels on `gpu`.

    `table` was measured on `base`, which is `gpu` or a similar GPU. `rates` are fitted, and are used without a table,
    for the dtypes that they have. `kind` is one of the module's origins.
    """

    gpu: GPU
    kind: str
    table: KernelTable | None
    base: GPU
    rates: Efficiency | None
    host: Efficiency
    bandwidth: float
    shares: dict[str, float]
    sustained: float  # share of the 16-bit peak that matmuls reach in long steps
    sustained_fp8: float  # the same in fp8
    spread: float
    reached: float | None  # FLOP/s of large 16-bit matmuls, measured by others; None with own grids
    flash: dict[str, dict[str, float]]  # 10^12 FLOP/s of attention in AMD's libraries (measured_rates.toml)
    scale: float  # the time of a FLOP on `gpu` divided by that on `base`
    _matmuls: dict[tuple[int, int, int, str], tuple[float | None, bool]] = field(default_factory=dict)
    _attentions: dict[tuple[int, int, int, int, str], float] = field(default_factory=dict)
    _known_limits: dict[str, tuple[float | None, float, int] | None] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """The source of the times of matmuls and attention, in words."""
        if clocks(self.gpu) < 1:
            own = replace(self, gpu=find_gpu(self.gpu.name))
            return f"{own.origin}, at {self.gpu.power:g} of {own.gpu.power:g} W"
        if self.kind == "transferred" and self.base.name != self.gpu.name:
            how = "measured rates of large matmuls" if self.reached else "data sheets"
            return f"transferred from {self.base.name} by the ratio of {how}"
        if self.table:
            return f"measured on {self.gpu.name}"
        if self.rates:
            return f"fitted to {self.rates.derived_from}"
        if self.reached:
            return f"large matmuls at {self.reached / 1e12:.0f} TFLOP/s (measured_rates.toml)"
        return f"{self.shares['products']:.0%} of the data sheet"

    @cached_property
    def sources(self) -> dict[str, str]:
        """The source of the rates of each part of a step (`timing.PARTS`), in words."""
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
        if not self.table and self.reached and self.gpu.peak("fp8"):
            products += ", in fp8 as much more as its peak is"
        if self.gpu.pcie and node_link(self.gpu).kind == "pcie":
            links = "inside a node as published ones (pcie_nodes.toml), else links.toml"
        reached = "fitted to records" if self.rates else f"{self.bandwidth / self.gpu.bandwidth:.0%} of the data sheet"
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
        """Rates of single operators, and the CPU's time to launch them: this GPU's own, or else those of `HOST`, scaled
        to this GPU's bandwidth."""
        if self.rates and self.rates.dispatch:
            return self.rates
        like = self.host
        faster = self.bandwidth / like.bandwidth
        return replace(
            like, gpu=self.gpu.name, sms=self.gpu.sms or like.sms, bandwidth=self.bandwidth,
            strided=faster * like.strided, gather=faster * like.gather,
        )  # fmt: skip

    def slower(self, kernel: str, length: int, head_size: int) -> float:
        """Return how many times as long `kernel` takes as the measured attention. The measured kernel is that of a
        serving engine with a paged KV cache, on Hopper FlashAttention 3, which is as fast as cuDNN's attention."""
        if kernel == "cudnn":
            return 1.0
        times = self.shares["efficient"] if kernel == "efficient" else 1.0
        return times * _flash_over_measured(self.base.name, length, head_size) if self.table else times

    @property
    def interval(self) -> float:
        """The factor by which 80 % of the predicted step times on one device are off at most."""
        return exp(self.spread)

    def backward(self, kernel: str, head_size: int = 128) -> float:
        """Return the seconds of the backward pass of fused attention divided by those of its forward pass."""
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
        """The clocks in a long step, relative to those of the bursts in which attention was measured.

        They follow from matmuls: their rate in long steps, divided by their highest rate alone. The result is 1 if
        power is not known to limit attention.
        """
        newest = (self.gpu.compute_capability or (0, 0)) >= BOUND_BY_EXPONENTIALS
        if self.sustained == 1 or newest or not self.table:
            return 1.0
        peak = self.gpu.peak("bf16")
        assert peak
        return min(1.0, self.sustained * peak * self.scale / _burst(self.base.name))

    def lasting(self, rate: float) -> float:
        """Return the share of a burst's clocks that a kernel with `rate` FLOP/s in a burst sustains in a long step.

        Power grows with the FLOP per cycle and with the cube of the clocks. A kernel at half the rate of the fastest
        matmul therefore sustains clocks that are a quarter higher, and FlashAttention 2 on an H100 those of a burst:
        with 16,384 to 131,072 tokens, NeMo 24.03.01, whose launcher turns cuDNN's attention off, took as long as the
        rates of FlashAttention 2's author predict. Boards with a lower power limit than the measured one do not show
        this in published steps (torchtitan's with 32,768 tokens and more, on H100s of 500 W), so they use `clocks`."""
        if find_gpu(self.gpu.name).power != self.base.power:
            return self.clocks
        return min(1.0, self.clocks * (_burst(self.base.name) / rate) ** (1 / 3))

    def measured(self, dtype: str) -> bool:
        """Return whether matmuls in `dtype` were measured, on this GPU or on `base`."""
        return self.table is not None and MEASURED_AS.get(dtype, dtype) in self.table.matmuls

    @property
    def longest(self) -> int | None:
        """The number of tokens of the longest sequence whose attention was measured, or None if none was."""
        return self.table.attentions["bf16"].grid.axes[1][-1] if self.table else None

    def extrapolates(self, m: int, n: int, k: int, dtype: str) -> bool:
        """Return whether a matmul's time is extrapolated: its dtype was measured, but only at other sizes."""
        return self.timed(m, n, k, dtype)[1]

    def matmul(self, m: int, n: int, k: int, dtype: str) -> float | None:
        """Return the seconds of the matmul (m, k) · (k, n) in `dtype`, or None if the GPU has no units for it. "mxfp8"
        is fp8 with a scale per 32 elements."""
        return self.timed(m, n, k, dtype)[0]

    def timed(self, m: int, n: int, k: int, dtype: str) -> tuple[float | None, bool]:
        """Return the results of `matmul` and `extrapolates`, computed once per matmul."""
        key = m, n, k, dtype
        try:
            return self._matmuls[key]
        except KeyError:
            time = _matmul(self.base.name, m, n, k, MEASURED_AS.get(dtype, dtype)) if self.table else None
            extrapolated = time is not None and not time.inside
            return self._matmuls.setdefault(key, (self._seconds(m, n, k, dtype, time), extrapolated))

    def summed(self, sizes: tuple[tuple[tuple[int, int, int, str], int], ...]) -> tuple[float | None, float]:
        """Return the seconds of matmuls ((m, n, k, dtype), count), and how many of these seconds are extrapolated. The
        former are None if the GPU has no units for one of the matmuls."""
        total = extrapolated_s = 0.0
        for key, times in sizes:
            one, extrapolated = self._matmuls.get(key) or self.timed(*key)
            if one is None:
                return None, 0.0
            total += times * one
            if extrapolated:
                extrapolated_s += times * one
        return total, extrapolated_s

    def _seconds(self, m: int, n: int, k: int, dtype: str, time: KernelTime | None) -> float | None:
        flop = 2.0 * m * n * k
        if dtype == "mxfp8":
            seconds = self.matmul(m, n, k, "fp8")
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
            if dtype == "fp8":  # casts are counted as element-wise operators (elementwise.FP8_CASTS)
                theirs = self.base.peak(dtype)
                assert theirs
                seconds = max(seconds - m * k * _cast_seconds(self.base.name), flop / theirs)
            return max(least, self._scaled(seconds, flop, moved, dtype))
        return LAUNCH + max(least, flop / rate, moved / self.bandwidth)

    def _limits(self, dtype: str) -> tuple[float | None, float, int] | None:
        """Return the FLOP/s that no matmul in `dtype` exceeds in a long step (None if no limit is known), the FLOP/s of
        a large matmul without a grid, and the bytes per element, or None if the GPU has no units for `dtype`."""
        if dtype in self._known_limits:
            return self._known_limits[dtype]
        limits = None
        if (peak := self.gpu.peak(dtype)) is not None:
            lasting = self.sustained_fp8 if dtype == "fp8" else self.sustained
            most, rate = peak * lasting if lasting < 1 else None, self.shares["products"] * peak
            if self.reached and dtype != "fp32":  # fp8 reaches the same share of its peak as 16 bits
                rate = self.reached * peak / (self.gpu.peak("bf16") or peak)
                most = min(most, rate) if most else rate
            limits = most, rate, {"fp32": 4, "fp8": 1}.get(dtype, 2)
        return self._known_limits.setdefault(dtype, limits)

    def _scaled(self, seconds: float, flop: float, moved: float, dtype: str) -> float:
        """Return the seconds on this GPU of a kernel that took `seconds` on `base`."""
        if self.base is self.gpu:
            return seconds
        theirs = self.base.peak(dtype)
        assert theirs
        computed, read = flop / theirs, moved / self.base.bandwidth
        return seconds * max(computed * self.scale, moved / self.gpu.bandwidth) / max(computed, read)

    def attention(self, batch: int, heads: int, length: int, head_size: int, kernel: str, dtype: str) -> float:
        """Return the seconds of the forward pass of fused causal attention.

        `kernel` is SDPA's FlashAttention 2 ("flash"), cuDNN's kernel ("cudnn"), which is as fast as FlashAttention 3
        (arXiv 2407.08608, figure 5), the memory-efficient kernel ("efficient"), which counts as slow as the first
        version of FlashAttention, or, on AMD's GPUs, Composable Kernel ("ck").
        """
        key = batch * heads, length, head_size, 0, kernel + dtype
        if key not in self._attentions:
            self._attentions[key] = self._attention(batch * heads, length, head_size, kernel, dtype)
        return self._attentions[key]

    def _attention(self, heads: int, length: int, head_size: int, kernel: str, dtype: str) -> float:
        flop = 2.0 * heads * length * length * head_size  # of two matmuls, without the masked half
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
        peak = self.gpu.peak(dtype) or self.gpu.peak("fp16") or self.gpu.peak_flops["fp32"]
        if self.reached and dtype != "fp32":
            peak = self.reached / self.shares["products"]
        return LAUNCH + slower * flop / (self.shares["attention"] * peak)

    def collective(self, operation: str, size: float, group: Group) -> float:
        """Return the seconds of a collective of `size` bytes: the measured time, if all ranks are in one node with the
        NVLink of the measurement at its usual rate, or else a time computed from the links."""
        link = group.inside
        joined = group.across is None and group.ranks > 1 and (link.bandwidth, link.reached) == self._joined
        # All-reduces were measured with NVLink SHARP if the node's switches support it.
        alike = operation != "all-reduce" or bool(group.inside.switched) == self._adding
        if self.table and joined and alike:
            time = _collective(self.base.name, operation, int(size) or 1, group.ranks)
            if time:
                return time.seconds
        return _linked(operation, size, group)

    @cached_property
    def _adding(self) -> bool:
        """Whether the switches in nodes of `base` compute the sums of an all-reduce (NVLink SHARP)."""
        return bool(node_link(self.base).switched)

    @cached_property
    def _joined(self) -> tuple[float, float] | None:
        """Bytes/s of the NVLink of `base` by data sheet and as reached, or None if this GPU has no such NVLink."""
        if self.gpu.nvlink is None or self.base.nvlink != self.gpu.nvlink:
            return None
        link = node_link(self.gpu)
        return link.bandwidth, link.reached


@lru_cache(maxsize=1 << 12)
def _flash_over_measured(gpu: str, length: int, head_size: int) -> float:
    """Return how many times as long FlashAttention 2 takes as the attention measured on `gpu`, or 1 on chips without
    rates by its author. These rates are interpolated in the logarithm of the length."""
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
    # The author counts the FLOP of the backward pass as those of 2.5 forward passes.
    forward = 3.5 * 2.0 * tokens * at * width / rate / (1 + BACKWARD)
    measured = table.attention(1, round(tokens / at * width / int(size)), at, int(size))
    return forward / measured.seconds if measured else 1.0


@lru_cache(maxsize=1 << 17)
def _matmul(gpu: str, m: int, n: int, k: int, dtype: str) -> KernelTime | None:
    """Return the measured time of a matmul. All GPUs to which it is transferred share this cache."""
    table = kernel_table(gpu)
    return table.matmul(m, n, k, dtype) if table else None


# Cached because runs on GPUs with the same table or the same links send the same messages.
@lru_cache(maxsize=1 << 12)
def _collective(gpu: str, operation: str, size: int, ranks: int) -> KernelTime | None:
    table = kernel_table(gpu)
    return table.collective(operation, size, ranks) if table else None


_linked = lru_cache(maxsize=1 << 12)(communication.seconds)


@cache
def _burst(gpu: str) -> float:
    """Return the FLOP/s of the fastest square matmul, which runs at the clocks of a burst."""
    bursts = [_matmul(gpu, m, m, m, "bf16") for m in BURSTS]
    return max(2.0 * m**3 / time.seconds for m, time in zip(BURSTS, bursts, strict=True) if time)


@cache
def _cast_seconds(gpu: str) -> float:
    """Return the seconds per element in which the measured fp8 matmuls cast their first matrix, as serving does in
    every step: the time by which (m, k) · (k, n) exceeds (n, k) · (k, m). In bf16, both take equally long."""
    times = {sizes: _matmul(gpu, *sizes, "fp8") for m, n, k in CASTING for sizes in ((m, n, k), (n, m, k))}
    known = {sizes: time.seconds for sizes, time in times.items() if time}
    return median((known[m, n, k] - known[n, m, k]) / ((m - n) * k) for m, n, k in CASTING)


def _reached(gpu: GPU) -> float | None:
    """Return the FLOP/s of large 16-bit matmuls that others measured on `gpu`, or None. AMD's MI350X is an MI355X with
    1000 W, and is assumed to reach the same share of its peak."""
    table, sources = read_table("measured_rates.toml"), ("zzc0721", "ROCm", "stas00", "chsasank", "mli")
    like = find_gpu(SLOWER.get(gpu.name, gpu.name))
    rate = next((table[by][like.name] for by in sources if like.name in table[by]), None)
    mine, theirs = find_gpu(gpu.name).peak("bf16"), like.peak("bf16")
    return 1e12 * rate * clocks(gpu) * (mine / theirs if mine and theirs else 1.0) if rate else None


@cache
def copy_share(gpu: GPU) -> float | None:
    """Return the share of the data sheet's bandwidth that a copy reaches on `gpu` (measured_rates.toml), or else the
    median of GPUs with its compute capability, whose memory is of the same kind, or None if there is none."""
    rates = read_table("measured_rates.toml")["copies"]
    shares = {find_gpu(name): 1e9 * rate / find_gpu(name).bandwidth for name, rate in rates.items()}
    own = [share for other, share in shares.items() if other.name == gpu.name]
    alike = [share for other, share in shares.items() if other.compute_capability == gpu.compute_capability]
    return median(own or alike) if alike else None


def _flash(gpu: GPU) -> dict[str, dict[str, float]]:
    """Return the 10^12 FLOP/s of fused attention by library and pass; empty for NVIDIA's GPUs."""
    rates, share = read_table("measured_rates.toml")["attention"], clocks(gpu)
    return {
        kind: {part: share * rate for part, rate in by[gpu.architecture].items()}
        for kind, by in rates.items() if gpu.architecture in by
    }  # fmt: skip


def _scale(gpu: GPU, base: GPU, reached: float | None) -> float:
    """Return the time of a FLOP on `gpu` divided by that on `base`, in 16 bits: by the rates of large matmuls, or else
    by the peaks."""
    large = _matmul(base.name, *LARGE, "bf16")
    if reached and large:
        return 2 * prod(LARGE) / large.seconds / reached
    theirs, mine = (device.peak("bf16") or device.peak("fp16") or device.peak("fp32") for device in (base, gpu))
    return theirs / mine if theirs and mine else 1.0


@cache
def training_rates() -> dict[str, Any]:
    """Return training.toml: the shares, factors and spreads of long training steps."""
    return read_table("training.toml")


@cache
def kernels(gpu: GPU | str) -> Kernels:
    """Return the kernel times of a GPU in the table."""
    data_sheet, shared = find_gpu(gpu), training_rates()
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
        gpu=data_sheet,
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


def _sustained(gpu: GPU, base: GPU | None) -> float:
    """Return the share of the peak that matmuls reach in a long step under the power limit, by compute capability. It
    is 1 for chips without published steps, and if the GPU's own units (an H20's) are the lower limit."""
    share: float = training_rates()["sustained"].get("{}.{}".format(*(gpu.compute_capability or (0, 0))), 1.0)
    if base is None:
        return 1.0
    theirs, mine = base.peak("bf16"), gpu.peak("bf16")
    return 1.0 if theirs and mine and mine < share * theirs else share


def _nearness(gpu: GPU, base: GPU | None, kind: str) -> str:
    """Return the name of the GPU's spread in training.toml: "AMD", "data sheet" if its grids are from another
    architecture, or `kind`."""
    if gpu.vendor == "AMD":
        return "AMD"
    return "data sheet" if base and base.architecture != gpu.architecture else kind


def _base(gpu: GPU) -> GPU | None:
    """Return the GPU whose grids are used for `gpu`.

    This is `gpu` itself (without a power limit), or else a GPU of the same compute capability, or else of the same
    architecture, or else of the nearest capability. Among several, the one with the nearest bandwidth is used. Without
    grids of its own, return None for other vendors' GPUs, and if rates were fitted to steps on `gpu`.
    """
    if kernel_table(gpu.name):
        return gpu if clocks(gpu) == 1 else find_gpu(gpu.name)
    if gpu.vendor != "NVIDIA" or efficiency(gpu):
        return None

    def distance(other: GPU) -> tuple[bool, bool, float, float]:
        distance = abs(_capability(other) - _capability(gpu))
        return distance > 0, other.architecture != gpu.architecture, distance, abs(other.bandwidth - gpu.bandwidth)

    return min(map(find_gpu, training_rates()["measured"]), key=distance)


def _capability(gpu: GPU) -> float:
    major, minor = gpu.compute_capability or (0, 0)
    return major + minor / 10
