"""How long an engine's kernels take on a GPU: by the measurements in hardware/engine_kernels, else by a roofline.

A GPU that nobody measured gets the time of data moved at 80 % of its data sheet's bandwidth, or of FLOP at 60 % of its
data sheet's peak, whichever is longer; the report says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import log2
from typing import Any

from ..base.errors import NotAvailable, SpecError
from ..hardware.gpu import GPU
from ..hardware.kernel_tables import FOLDER, SCHEMA, WORK, Grid, KernelTable, kernel_table, timed

MEASURED = FOLDER.with_name("engine_kernels")
BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4.25, "nvfp4": 4.5, "mxfp4": 4.25}  # with their scales
BANDWIDTH, COMPUTE = 0.8, 0.6  # shares of the data sheet that kernels reach where none was measured
LAUNCH = 2e-6  # seconds of the shortest kernel within a CUDA graph, from one start to the next


@dataclass(frozen=True)
class ExpertTimes:
    """Times of one layer's routed experts, by shape (hidden, width, per token, experts, tp, ep) and tokens."""

    tokens: tuple[int, ...]
    shapes: Mapping[tuple[int, ...], tuple[int, ...]]

    def seconds(self, shape: tuple[int, ...], tokens: int) -> float:
        """Return the time for a measured shape, linear in the logarithms between the measured numbers of tokens."""
        grid = Grid((self.tokens,), self.shapes[shape])
        return timed(grid, (tokens,), (1,)).seconds


@dataclass(frozen=True)
class EngineKernels:
    """The kernels of `gpu`; `measured` is False where all times are a roofline's."""

    gpu: GPU
    general: KernelTable | None
    matmuls: Mapping[str, Grid]
    decode_attentions: Mapping[str, Grid]
    latent_decode: Mapping[str, Grid]
    latent_prefill: Mapping[str, Grid]
    experts: Mapping[str, Mapping[str, ExpertTimes]]
    all_reduces: Mapping[str, Grid]

    @property
    def measured(self) -> bool:
        """Whether any kernel of this GPU was measured."""
        return bool(self.decode_attentions)

    def __hash__(self) -> int:
        return hash(self.gpu.name)

    def moved(self, size: float) -> float:
        """Return the seconds in which a kernel reads and writes `size` bytes."""
        return LAUNCH + size / (BANDWIDTH * self.gpu.bandwidth)

    def computed(self, flops: float, dtype: str) -> float:
        """Return the seconds of `flops` at the share of the data sheet's peak that large matmuls reach."""
        peaks = (self.gpu.peak(kind) for kind in (dtype, "bf16", "fp16", "fp32"))
        return flops / (COMPUTE * next(peak for peak in peaks if peak))

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def matmul(self, m: int, n: int, k: int, dtype: str) -> float:
        """Return the seconds of (m, k) · (k, n) with weights in `dtype`.

        Weights in 4 bits that no unit multiplies (AWQ, GPTQ, mxfp4) are unpacked as they are read: the bytes are those
        of the packed weight, the FLOP those of bf16.
        """
        grid = self.matmuls.get(dtype)
        if grid is not None:
            return timed(grid, (m, n, k), WORK["matmuls"]).seconds
        if self.general and dtype in ("bf16", "fp16") and (known := self.general.matmul(m, n, k)):
            return known.seconds
        read = n * k * BITS[dtype] / 8 + 2 * m * (n + k)
        return max(self.moved(read), self.computed(2 * m * n * k, "bf16" if BITS[dtype] < 8 else dtype))

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def decode(self, head_dim: int, sequences_heads: int, length: int, kv: str) -> float:
        """Return the seconds in which one new token of each sequence attends to `length` cached ones."""
        grid = self.decode_attentions.get(kv)
        if grid is not None:
            return timed(grid, (head_dim, sequences_heads, length), WORK["decode_attentions"]).seconds
        return 3 * LAUNCH + self.moved(sequences_heads * length * 2 * head_dim * BITS[kv] / 8)

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def prefill(self, heads: int, head_dim: int, tokens: int, context: int, prompts: int = 1) -> float:
        """Return the seconds of causal attention of `tokens` new tokens of each of `prompts`, after `context` others.

        Kernels were measured without a context. Tokens after one take as long as a whole prompt of as many pairs.
        """
        if tokens < 1:
            return 0.0
        if self.general and (known := self.general.attention(prompts, heads, equally_many(tokens, context), head_dim)):
            return known.seconds
        pairs = tokens * ((tokens + 1) / 2 + context)
        return self.moved(0) + self.computed(4 * heads * head_dim * prompts * pairs, "bf16")

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def latent_attention(self, heads: int, sequences: int, length: int, rank: int, kv: str) -> float:
        """Return the seconds in which one new token of each sequence attends to `length` cached latents."""
        grid = self.latent_decode.get(kv) or self.latent_decode.get("bf16")
        if grid is not None:
            return timed(grid, (heads, sequences, length), WORK["latent_decode"]).seconds
        read = self.moved(sequences * length * rank * BITS[kv] / 8)
        return 3 * LAUNCH + max(read, self.computed(4 * sequences * heads * length * rank, "bf16"))

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def latent_prompt(self, heads: int, tokens: int, context: int, head_dim: int) -> float:
        """Return the seconds of attention of a prompt's `tokens` new tokens, latents turned into keys and values."""
        if tokens < 1:
            return 0.0
        if grid := self.latent_prefill.get("bf16"):
            return timed(grid, (heads, equally_many(tokens, context)), WORK["latent_prefill"]).seconds
        pairs = tokens * ((tokens + 1) / 2 + context)
        return self.moved(0) + self.computed(4 * heads * head_dim * pairs, "bf16")

    def routed_experts(
        self, engine: str, dtype: str, shape: tuple[int, int, int, int, int, int], tokens: int, gated: bool = True
    ) -> float:
        """Return the seconds of a layer's routed experts for `tokens` tokens of all GPUs.

        `shape`: hidden size, an expert's width, experts per token, experts, and the degrees tp and ep over which they
        are divided. A shape that was not measured takes the time of the nearest one that was, times what a roofline
        says of both.
        """
        return _routed(self, engine, dtype, shape, max(1, tokens), gated)

    def all_reduce(self, engine: str, ranks: int, size: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes between `ranks` GPUs of a node."""
        if ranks == 1:
            return 0.0
        grid = self.all_reduces.get(engine) or next(iter(self.all_reduces.values()), None)
        if grid is not None and ranks <= grid.axes[0][-1]:
            return timed(grid, (ranks, size), WORK["collectives"]).seconds
        link = self.gpu.nvlink or 25e9
        return 4 * LAUNCH + 2 * (ranks - 1) / ranks * size / link

    def gather(self, operation: str, ranks: int, size: int) -> float:
        """Return the seconds of an "all-gather" or "reduce-scatter" with `size` bytes in the whole."""
        if ranks == 1:
            return 0.0
        if self.general and (known := self.general.collective(operation, size, ranks)):
            return known.seconds
        return 4 * LAUNCH + (ranks - 1) / ranks * size / (self.gpu.nvlink or 25e9)


def equally_many(tokens: int, context: int) -> int:
    """Return the length of a whole prompt in which as many tokens attend to each other as `tokens` after `context`.

    >>> equally_many(512, 0), equally_many(16, 8000)
    (512, 506)
    """
    pairs = tokens * (tokens + 1) // 2 + tokens * context
    return round(((1 + 8 * pairs) ** 0.5 - 1) / 2)


@lru_cache(maxsize=1 << 14)
def _routed(
    kernels: EngineKernels, engine: str, dtype: str, shape: tuple[int, ...], tokens: int, gated: bool
) -> float:
    expected = expert_roofline(kernels, dtype, shape, tokens, gated)
    by_engine = [kernels.experts.get(engine, {}), *kernels.experts.values()]
    table = next((times[dtype] for times in by_engine if dtype in times), None)
    if table is None:
        return expected
    if shape in table.shapes:
        return table.seconds(shape, tokens)
    nearest = min(table.shapes, key=lambda other: _distance(shape, other))
    return table.seconds(nearest, tokens) * expected / expert_roofline(kernels, dtype, nearest, tokens, True)


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Return how far apart two shapes are: by an expert's local size, local experts, and experts per token."""
    sizes = [(h * f / tp, count / ep, per_token) for h, f, per_token, count, tp, ep in (one, other)]
    return sum([abs(log2(a / b)) for a, b in zip(*sizes, strict=True)])


def expert_roofline(
    kernels: EngineKernels, dtype: str, shape: tuple[int, ...], tokens: int, gated: bool = True
) -> float:
    """Return the seconds of routed experts by a roofline: the weights of those that are touched, or the FLOP.

    How many are touched by so many draws: real routers prefer some experts, so that after as many draws as there are
    experts half of them are touched, where 63 % would be if all were equally likely.
    """
    hidden, width, per_token, count, tp, ep = shape
    draws, local = tokens * per_token / ep, count / ep
    touched = min(draws, local * (1 - 1 / (1 + draws / local)))
    matrices = 3 if gated else 2
    weights = touched * matrices * hidden * width / tp * BITS[dtype] / 8
    moved = weights + draws * 2 * (2 * hidden + matrices * width / tp)
    flops = draws * 2 * matrices * hidden * width / tp
    return 8 * LAUNCH + max(kernels.moved(moved), kernels.computed(flops, "fp8" if dtype == "fp8" else "bf16"))


@cache
def engine_kernels(gpu: GPU) -> EngineKernels:
    """Return the kernels of `gpu`. Raises NotAvailable for a GPU that was named by its memory, and SpecError for a file
    that tools/import_engine_kernels.py did not write."""
    if gpu.by_memory:
        raise NotAvailable(f"times on {gpu.name} are unknown, because it names no GPU model; give one of `llmlab gpus`")
    path = MEASURED / f"{gpu.name}.json"
    data: dict[str, Any] = {"schema": SCHEMA}
    try:
        if path.is_file():
            data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise SpecError(f"this version of llmlab reads schema {SCHEMA}")
        experts = {
            engine: {dtype: _expert_times(entry) for dtype, entry in by_dtype.items()}
            for engine, by_dtype in data.get("experts", {}).items()
        }
        return EngineKernels(
            gpu, kernel_table(gpu.name), _grids(data, "matmuls"), _grids(data, "decode_attentions"),
            _grids(data, "latent_decode"), _grids(data, "latent_prefill"), experts, _grids(data, "all_reduces"),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, SpecError) as error:
        raise SpecError(f"{path} has no kernel times ({error}); tools/import_engine_kernels.py writes them") from None


def _grids(data: Mapping[str, Any], family: str) -> dict[str, Grid]:
    grids = data.get(family, {}).items()
    return {key: Grid(tuple(map(tuple, entry["axes"])), tuple(entry["values"])) for key, entry in grids}


def _expert_times(entry: Mapping[str, Any]) -> ExpertTimes:
    rows = zip(entry["shapes"], entry["values"], strict=True)
    return ExpertTimes(tuple(entry["tokens"]), {tuple(shape): tuple(values) for shape, values in rows})


