"""Distil the kernels of serving engines out of aiconfigurator-core: a wheel -> llmlab/hardware/engine_kernels/.

    pip download --no-deps aiconfigurator-core==0.12.0
    python tools/import_engine_kernels.py aiconfigurator_core-0.12.0-*.whl      # needs pandas and pyarrow

Kept of each card, as lists of round(64 · log2(nanoseconds)):

* `matmuls` in fp8 and nvfp4: at each size the fastest of the frameworks' kernels, which is the one to be chosen.
* `decode_attentions`: one new token per sequence, by the cache's dtype. Its time is that of reading the cache: the
  number of query heads and the framework hardly matter (a few percent), so the mean is kept by head size, sequences ·
  kv heads, and length.
* `latent_decode`, `latent_prefill`: attention on the latent cache of DeepSeek's models, by heads.
* `experts`: one layer's routed experts, by framework and dtype; a row per shape, a column per number of tokens.
* `all_reduces`: the frameworks' own all-reduce between the GPUs of a node, by ranks and bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from math import log2
from pathlib import Path

import pandas
from import_kernels import CARDS, gridded, is_power, tables

from llmlab.hardware.kernel_tables import SCHEMA, UNIT

FOLDER = Path(__file__).resolve().parent.parent / "llmlab" / "hardware" / "engine_kernels"
FP8 = ("fp8", "fp8_block")
CACHES = {"bfloat16": "bf16", "fp8": "fp8"}
N_AND_K = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 51200, 65536)
TOKENS = (1, 4, 16, 32, 64, 256, 1024, 4096, 16384)
# Hidden size, width of an expert, experts per token, experts: of models that people serve.
EXPERTS = {
    (4096, 14336, 2, 8), (6144, 16384, 2, 8),  # Mixtral
    (2048, 768, 8, 128), (4096, 1536, 8, 128), (6144, 2560, 8, 160),  # Qwen3
    (2048, 512, 10, 512), (2048, 512, 8, 256), (3072, 1024, 8, 256), (4096, 1024, 10, 512),  # Qwen3-Next, Qwen3.5
    (7168, 2048, 8, 256), (7168, 2048, 8, 384),  # DeepSeek-V3, Kimi-K2
    (2880, 2880, 4, 32), (2880, 2880, 4, 128),  # gpt-oss
    (3072, 1536, 8, 256), (5120, 1536, 8, 160), (4096, 1408, 8, 128), (6144, 2048, 8, 256),  # MiniMax-M2, GLM
    (5120, 8192, 1, 16), (5120, 8192, 1, 128), (2688, 1856, 6, 128),  # Llama 4, Nemotron 3
}  # fmt: skip
EXPERT_DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4", "int4_wo": "int4",
                 "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4"}  # fmt: skip
DISTRIBUTION = "power_law_1.01"  # of tokens over experts


def matmul(found: Mapping[str, pandas.DataFrame], dtypes: Sequence[str]) -> dict | None:
    """Return the grid of the fastest kernels in any of `dtypes`."""
    rows = pandas.concat([table[table.gemm_dtype.isin(dtypes)] for table in found.values()])
    if rows.empty:
        return None
    measured = (rows.groupby(["m", "n", "k"]).latency.min() * 1e6).to_dict()
    axes = (
        sorted({m for m, _, _ in measured if is_power(m)}),
        *(sorted({point[axis] for point in measured if point[axis] in N_AND_K}) for axis in (1, 2)),
    )
    return {"measured_by": list(found), **gridded(measured, axes, "matmuls")}


def decode_attention(found: Mapping[str, pandas.DataFrame], dtype: str) -> dict | None:
    """Return the grid of attention to a cache in `dtype`, by head size, sequences · kv heads and length."""
    rows = pandas.concat(found.values())
    rows = rows[(rows.kv_cache_dtype == dtype) & (rows.num_heads <= 8 * rows.num_key_value_heads)]
    rows = rows[(rows.window_size.fillna(0) == 0) & (rows.step >= 63)]
    if rows.empty:
        return None
    keys = [rows.head_dim, rows.batch_size * rows.num_key_value_heads, rows.step + 1]
    mean = (rows.latency * 1e6).map(log2).groupby(keys).mean()
    measured = {point: 2**value for point, value in mean.items()}
    axes = ([64, 128, 256], *(sorted({point[axis] for point in measured if is_power(point[axis])}) for axis in (1, 2)))
    axes = ([size for size in axes[0] if any(point[0] == size for point in measured)], *axes[1:])
    return {"measured_by": list(found), **gridded(measured, axes, "decode_attentions")}


def latent(found: Mapping[str, pandas.DataFrame], dtype: str, prefill: bool) -> dict | None:
    """Return the grid of attention on latents: by heads, sequences and length, or for a prompt by heads and length."""
    rows = pandas.concat(found.values()) if found else pandas.DataFrame()
    if rows.empty or (rows := rows[rows.kv_cache_dtype == dtype]).empty:
        return None
    if prefill:
        rows = rows[(rows.batch_size == 1) & (rows.isl >= 64)]
        keys, family = [rows.num_heads, rows.isl], "latent_prefill"
    else:
        rows = rows[rows.step >= 63]
        keys, family = [rows.num_heads, rows.batch_size, rows.step + 1], "latent_decode"
    measured = (rows.latency.groupby(keys).min() * 1e6).to_dict()
    count = len(next(iter(measured)))
    axes = tuple(sorted({point[axis] for point in measured if is_power(point[axis])}) for axis in range(count))
    return {"measured_by": list(found), **gridded(measured, axes, family)}


def all_versions(wheel: zipfile.ZipFile, card: str, framework: str) -> pandas.DataFrame:
    """Return all measurements of routed experts, the newest version last."""
    frames = []
    for path in wheel.namelist():
        if match := re.search(rf"systems/data/{card}/moe/{framework}/([^/]+)/moe_perf\.parquet$", path):
            version = tuple(map(int, re.findall(r"\d+", match[1])))
            frames.append((version, pandas.read_parquet(BytesIO(wheel.read(path)))))
    return pandas.concat([frame for _, frame in sorted(frames, key=lambda pair: pair[0])]) if frames else None


def experts(table: pandas.DataFrame) -> dict[str, dict]:
    """Return, by dtype, the shapes (hidden, width, experts per token, experts, tp, ep) and their times at TOKENS."""
    rows = table[(table.distribution == DISTRIBUTION) & table.num_tokens.isin(TOKENS)]
    rows = rows[rows.moe_dtype.isin(EXPERT_DTYPES) & ((rows.moe_tp_size == 1) | (rows.moe_ep_size == 1))]
    columns = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
    newest: dict[tuple, dict[int, float]] = {}
    for row in rows.itertuples():  # a later version replaces an earlier one; of its kernels the fastest counts
        shape = tuple(int(getattr(row, column)) for column in columns)
        if shape[:4] in EXPERTS and shape[4] <= 8 and shape[5] <= 64:
            key = EXPERT_DTYPES[row.moe_dtype], shape, row.version
            times = newest.setdefault(key, {})
            times[row.num_tokens] = min(row.latency * 1e6, times.get(row.num_tokens, 1e18))
    whole = {(dtype, shape): times for (dtype, shape, _), times in newest.items() if len(times) == len(TOKENS)}
    by_dtype: dict[str, dict] = {}
    for (dtype, shape), times in sorted(whole.items()):
        kept = by_dtype.setdefault(dtype, {"tokens": list(TOKENS), "shapes": [], "values": []})
        kept["shapes"].append(list(shape))
        kept["values"].append([round(UNIT * log2(times[count])) for count in TOKENS])
    return by_dtype


def all_reduce(table: pandas.DataFrame) -> dict:
    """Return the grid of one framework's all-reduce by ranks and bytes; the wheel counts elements of 2 bytes."""
    measured = (table.latency.groupby([table.num_gpus, 2 * table.message_size]).min() * 1e6).to_dict()
    axes = (sorted({ranks for ranks, _ in measured}), sorted({size for _, size in measured}))
    return gridded(measured, axes, "collectives")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    path = parser.parse_args().wheel
    if not path.is_file():
        parser.error(f"{path}: no such file; pip download --no-deps aiconfigurator-core")
    name, version = path.name.split("-")[:2]
    FOLDER.mkdir(exist_ok=True)
    with zipfile.ZipFile(path) as wheel:
        for card, (gpu, _) in CARDS.items():
            matmuls = tables(wheel, card, "gemm", "gemm")
            attentions = tables(wheel, card, "attention", "generation_attention")
            decode = tables(wheel, card, "mla", "generation_mla")
            prefill = tables(wheel, card, "mla", "context_mla")
            by_framework = {each: all_versions(wheel, card, each) for each in ("vllm", "sglang", "trtllm")}
            reduces = tables(wheel, card, "comm", "custom_allreduce")
            data = {
                "schema": SCHEMA,
                "gpu": gpu,
                "source": f"{name.replace('_', '-')} {version} (NVIDIA, Apache-2.0)",
                "matmuls": kept({"fp8": matmul(matmuls, FP8), "nvfp4": matmul(matmuls, ("nvfp4",))}),
                "decode_attentions": kept(
                    {ours: decode_attention(attentions, theirs) for theirs, ours in CACHES.items()}
                ),
                "latent_decode": kept(
                    {ours: latent(decode, theirs, False) for theirs, ours in CACHES.items()}
                ),
                "latent_prefill": kept({"bf16": latent(prefill, "bfloat16", True)}),
                "experts": {each: experts(table) for each, table in by_framework.items() if table is not None},
                "all_reduces": {framework.split()[0]: all_reduce(table) for framework, table in reduces.items()},
            }
            text = json.dumps(data, separators=(",", ":"))
            (FOLDER / f"{gpu}.json").write_text(re.sub(r'("(?:\w|-)+":\{)', r"\n\1", text) + "\n")
            print(gpu, len(text), {e: {d: len(v["shapes"]) for d, v in x.items()} for e, x in data["experts"].items()})
    return 0


def kept(grids: Mapping[str, dict | None]) -> dict[str, dict]:
    """Return the grids that exist."""
    return {key: grid for key, grid in grids.items() if grid is not None}


if __name__ == "__main__":
    sys.exit(main())
