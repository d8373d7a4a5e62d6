"""Distil the kernel measurements of aiconfigurator-core: a wheel -> llmlab/hardware/kernels/CARD.json.

    pip download --no-deps aiconfigurator-core==0.12.0
    python tools/import_kernels.py aiconfigurator_core-0.12.0-*.whl      # needs pandas and pyarrow

The wheel (NVIDIA, Apache-2.0) has one parquet table per card, kernel family and framework. Of each card this keeps
three kinds of grids, each a list of round(64 · log2(nanoseconds)), which is 0.5 % at most beside the figure:

* `matmul`, by dtype: (m, n) = (m, k) · (k, n). The frameworks all call torch's or cuBLAS' product; kept is the mean of
  their logarithms at the points which all of them have. In fp8 only TensorRT-LLM calls cuBLASLt (its cublas_scaled_mm),
  as Transformer Engine and torch._scaled_mm do; the others' own kernels are up to a third slower on Blackwell.
* `attention`, by kernel: the causal forward pass in bf16, by head size, length and batch · heads.
* `collectives`, by operation: NCCL between the GPUs of a node, by ranks and bytes.

`left_out` is what interpolation in the kept grid is off on measured points that the grid leaves out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import product
from math import log2
from pathlib import Path
from statistics import median, quantiles

import pandas

from llmlab.hardware.kernel_tables import SCHEMA, UNIT, WORK, Grid, padding

FOLDER = Path(__file__).resolve().parent.parent / "llmlab" / "hardware" / "kernels"
# The wheel's name of a card, ours, and its multiprocessors.
CARDS = {
    "a100_sxm": ("A100-80GB", 108), "h100_sxm": ("H100-80GB", 132), "h200_sxm": ("H200", 132),
    "b200_sxm": ("B200", 148), "b300_sxm": ("B300", 148), "gb200": ("GB200", 152), "gb300": ("GB300", 152),
    "l40s": ("L40S", 142), "rtx_pro_6000_server": ("RTX-PRO-6000", 188),
}  # fmt: skip
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
CUBLAS_FP8 = "trtllm"
TILE = (128, 256)  # of cuBLAS' large products on Ampere and Ada; Hopper's and Blackwell's kernels are persistent
N_AND_K = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 51200, 65536)
OPERATIONS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
              "alltoall": "all-to-all"}  # fmt: skip
KERNELS = ("vllm_flash_attn", "vllm_flash_attn_fa2", "vllm_flash_attn_fa3", "vllm_flashinfer_trtllmprefill",
           "vllm_flashinfer")  # fmt: skip # FlashAttention where it was measured, as it is what torch runs
LEFT_OUT = 2000  # points that the error of interpolation is taken on


def tables(wheel: zipfile.ZipFile, card: str, family: str, name: str) -> dict[str, pandas.DataFrame]:
    """Return the newest table of each framework, by "framework version"."""
    found: dict[str, tuple[tuple, str, pandas.DataFrame]] = {}
    for path in wheel.namelist():
        if match := re.search(rf"systems/data/{card}/{family}/(\w+)/([^/]+)/{name}_perf\.parquet$", path):
            version = tuple(map(int, re.findall(r"\d+", match[2])))
            if match[1] not in found or version > found[match[1]][0]:
                found[match[1]] = version, match[2], pandas.read_parquet(BytesIO(wheel.read(path)))
    return {f"{framework} {text}": table for framework, (_, text, table) in sorted(found.items())}


def matmul(found: Mapping[str, pandas.DataFrame], dtype: str, sms: int) -> dict | None:
    """Return the grid of products in `dtype`, None where no framework measured them."""
    columns = {}
    for framework, table in found.items():
        if dtype == "fp8" and not framework.startswith(CUBLAS_FP8):
            continue  # kernels of its own
        rows = table[table.gemm_dtype == dtype].drop_duplicates(["m", "n", "k"]).set_index(["m", "n", "k"])
        if len(rows):
            columns[framework] = (rows.latency * 1e6).map(log2)
    if not columns:
        return None
    together = pandas.concat(columns.values(), axis=1).dropna().mean(axis=1)
    measured = {point: 2**mean for point, mean in together.items()}
    axes = (
        sorted({m for m, _, _ in measured if is_kept(m)}),
        *(sorted({point[axis] for point in measured if point[axis] in N_AND_K}) for axis in (1, 2)),
    )
    # Of the grids with and without whole waves, the one that is nearer to points which neither has.
    grids = [gridded(measured, axes, "matmuls", tile, sms) for tile in (None, TILE)]
    return {"measured_by": list(columns), **min(grids, key=lambda grid: grid["left_out"]["median"])}


def attention(found: Mapping[str, pandas.DataFrame]) -> dict:
    """Return the grid of causal attention in bf16 without a window, of the first of KERNELS that was measured."""
    for framework, table in found.items():
        rows = table[(table.attn_dtype == "bfloat16") & table.kv_cache_dtype.isin(["bfloat16", "float16"])]
        rows = rows[(rows.step == 0) & (rows.isl >= 128)]
        if "window_size" in rows:
            rows = rows[rows.window_size == 0]
        for kernel in KERNELS:
            of_kernel = rows[rows.kernel_source == kernel]
            if len(of_kernel) < 1000:
                continue
            heads = of_kernel.batch_size * of_kernel.num_heads
            mean = (of_kernel.latency * 1e6).map(log2).groupby([of_kernel.head_dim, of_kernel.isl, heads]).mean()
            measured = {point: 2**value for point, value in mean.items()}
            axes = tuple(sorted({point[axis] for point in measured if is_power(point[axis])}) for axis in range(3))
            return {"measured_by": [framework], "kernel": kernel, **gridded(measured, axes, "attentions")}
    raise SystemExit(f"none of {', '.join(KERNELS)} was measured")


def collectives(found: Mapping[str, pandas.DataFrame]) -> dict[str, dict]:
    """Return the grids of NCCL's operations, by ranks and bytes; the wheel counts elements of fp16."""
    framework, table = list(found.items())[-1]
    rows = table[table.nccl_dtype == "half"].drop_duplicates(["op_name", "num_gpus", "message_size"])
    operations = {}
    for theirs, ours in OPERATIONS.items():
        of_op = rows[rows.op_name == theirs]
        sizes = zip(of_op.num_gpus, 2 * of_op.message_size, of_op.latency * 1e6, strict=True)
        measured = {(ranks, size): nanoseconds for ranks, size, nanoseconds in sizes}
        axes = (sorted({ranks for ranks, _ in measured}), sorted({size for _, size in measured}))
        operations[ours] = {"measured_by": [framework], **gridded(measured, axes, "collectives")}
    return operations


def gridded(measured: Mapping, axes: Sequence, family: str, tile: tuple | None = None, sms: int = 1) -> dict:
    """Return the grid over `axes`, and what it is off by on the measured points that it leaves out."""
    kept = {point: nanoseconds / padding(point, tile, sms) for point, nanoseconds in measured.items()}
    values: dict[tuple, float] = {}
    for point in product(*axes):  # what was too large to measure: as long as its neighbour, times the work
        values[point] = kept.get(point) or grown(values, axes, point, WORK[family])
    grid = Grid(tuple(map(tuple, axes)), tuple(round(UNIT * log2(values[point])) for point in product(*axes)))
    out = {"axes": [list(map(int, axis)) for axis in axes], "values": list(grid.values)}
    if tile:
        out["tile"] = list(tile)
    others = [p for p in measured if p not in values and grid.contains(p) and (family != "matmuls" or is_training(p))]
    if others:
        sample = random.Random(0).sample(sorted(others), min(LEFT_OUT, len(others)))
        off = [abs(grid.nanoseconds(p) * padding(p, tile, sms) / measured[p] - 1) for p in sample]
        out["left_out"] = {
            "points": len(off),
            "median": round(median(off), 4),
            "p90": round(quantiles(off, n=10)[-1], 4),
        }
    return out


def grown(values: Mapping, axes: Sequence, point: tuple, powers: Sequence[int]) -> float:
    """Return the time of `point`, which was not measured, from that of a smaller neighbour."""
    for axis in (2, 1, 0):
        if axis < len(axes) and (place := axes[axis].index(point[axis])):
            before = axes[axis][place - 1]
            return values[(*point[:axis], before, *point[axis + 1 :])] * (point[axis] / before) ** powers[axis]
    raise SystemExit(f"{point} was not measured, and nothing smaller")


def is_power(x: int) -> bool:
    return x & (x - 1) == 0


def is_kept(m: int) -> bool:
    """Return whether a row of this m is in the grid: powers of two, halves between them, multiples of 256."""
    return is_power(m) or m in (48, 96, 192) or m % 256 == 0


def is_training(point: tuple) -> bool:
    """Return whether a product is of a size that training has: on those the error is stated."""
    m, n, k = point
    return m >= 256 and m % 16 == 0 and min(n, k) >= 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    path = parser.parse_args().wheel
    if not path.is_file():
        parser.error(f"{path}: no such file; pip download --no-deps aiconfigurator-core")
    name, version = path.name.split("-")[:2]
    with zipfile.ZipFile(path) as wheel:
        for card, (gpu, sms) in CARDS.items():
            products = tables(wheel, card, "gemm", "gemm")
            data = {
                "schema": SCHEMA,
                "gpu": gpu,
                "device": str(next(iter(products.values())).device.iloc[0]),
                "source": f"{name.replace('_', '-')} {version} (NVIDIA, Apache-2.0)",
                "sms": sms,
                "matmuls": {ours: grid for theirs, ours in DTYPES.items() if (grid := matmul(products, theirs, sms))},
                "attentions": {"bf16": attention(tables(wheel, card, "attention", "context_attention"))},
                "collectives": collectives(tables(wheel, card, "comm", "nccl")),
            }
            text = json.dumps(data, separators=(",", ":"))
            (FOLDER / f"{gpu}.json").write_text(re.sub(r'("(?:\w|-)+":\{)', r"\n\1", text) + "\n")
            for family in ("matmuls", "attentions"):
                for key, grid in data[family].items():
                    print(f"{gpu}: {family} in {key}, off on points left out: {grid['left_out']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
