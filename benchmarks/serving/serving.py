"""lab.serve against deployments that others measured: latency, throughput, and which deployment is the best.

    python -m benchmarks.serving.serving --out benchmarks/results  # 10 minutes
    python -m benchmarks.serving.serving --every 8                 # a sample

serving.csv has 2,256 deployments: InferenceX's runs as exported in ai-dynamo/aiconfigurator (Apache-2.0), and the
ML.ENERGY leaderboard's. It is half of them, drawn by (source, model, GPU). This rule maps a row to a Service:

* engine, tp, ep, prompt and output length are the row's. Its concurrency is that of one copy of attention; the id names
  that of all (c128), so that their ratio is attention_dp where the row does not say it. A row whose ep or attention_dp
  is larger than its tp is divided over that many GPUs. Rows on more than 8 GPUs (several nodes), or whose ep is
  neither 1 nor tp, are left out.
* weights: the row's; "nvfp4" and "fp8" of gpt-oss are the checkpoint's own mxfp4; int4 is gptq's. TensorRT-LLM's
  checkpoints in fp8 and nvfp4 have a KV cache in fp8 (NVIDIA ModelOpt's default), all others one in bf16.
* InferenceX's runs have three shapes. Their scripts (SemiAnalysisAI/InferenceX, benchmarks/, read 2026-11-29) give the
  servers options that the rows do not have: launched.csv has the dtype of the KV cache, the tokens of a step, and the
  interval between two looks for new requests, by engine, model, GPU and users. Both lengths are drawn from 80 to 100 %
  of the row's (random-range-ratio). All other shapes are aiconfigurator's own runs, with equal lengths and defaults
  (of vLLM 0.15: 8,192 tokens in a step, also where later versions take more).
* Each user sends ten requests, the first of them all at the same moment. The times are means over all requests: those
  of the first burst wait for each other, so that a mean is above the median. The rows do not say which of the two they
  have; only the mean explains how the time to the first token of short prompts grows with the users.
* ML.ENERGY says the mean running batch and the median time between tokens: a step that gives so many requests a token
  is compared, after 512 tokens of prompt, which it does not say, and half of the answer.

The rows are in view, not held out: engines, sizes and weights were mapped before the first prediction, but the cache in
fp8, the drawn lengths, ML.ENERGY's prompt, means, copies and launched.csv after it, and mechanisms were corrected with
all rows in sight. Only the constants (STEP_HOST, ROW_HOST, START_HOST, ARRIVING, TOKENIZING) come from a part, the fit
rows: those of InferenceX whose id's SHA-256 is divisible by FITTED. `python -m benchmarks.serving.fit` fits them and
lists the rows; the others are reported. The intervals were chosen on the reported rows.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

import llmlab as lab
from benchmarks.provenance import provenance, write
from llmlab.base.errors import SpecError, UnknownName
from llmlab.hardware.gpu import GPU
from llmlab.serving.load import simulate
from llmlab.serving.memory import divided_memory
from llmlab.serving.report import checked
from llmlab.serving.step import Step, step_seconds
from llmlab.specs.model import ModelSpec

FILE = Path(__file__).with_suffix(".csv")
BESIDE = FILE.with_name("aiconfigurator.csv")
FITTED = 9
DEFAULT_TOKENS = 8192
WEIGHTS = {"bfloat16": "bf16", "bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "int4": "gptq", "int4_wo": "gptq",
           "nvfp4": "nvfp4", "fp4": "nvfp4", "mxfp4": "mxfp4"}  # fmt: skip
GPUS = {"H100": "H100-80GB"}
# Models whose language model is another preset's.
SAME = {"zhipuai/GLM-5": "zai-org/GLM-5", "moonshotai/Kimi-K2.5": "moonshotai/Kimi-K2-Instruct",
        "Qwen/Qwen3-VL-235B-A22B-Instruct": "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-VL-32B-Instruct": "Qwen/Qwen3-32B",
        "Qwen/Qwen3-VL-30B-A3B-Instruct": "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-VL-8B-Instruct": "Qwen/Qwen3-8B",
        "Qwen/Qwen3-Omni-30B-A3B-Instruct": "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": "Qwen/Qwen3-30B-A3B",
        "deepseek-ai/DeepSeek-V3.1": "deepseek-ai/DeepSeek-V3",
        "deepseek-ai/DeepSeek-R1-0528": "deepseek-ai/DeepSeek-V3"}  # fmt: skip
SHAPES = ((1024, 1024), (1024, 8192), (8192, 1024))  # of InferenceX's runs; others are aiconfigurator's own
ENDINGS = ("-NVFP4", "-FP8", "-2507", "-Instruct", "-Thinking", "-it")


@dataclass(frozen=True)
class Row:
    """A measured deployment, and what is predicted of it; seconds, output tokens per second per GPU."""

    id: str
    source: str
    engine: str
    model: str
    gpu: str
    shape: tuple[int, int]
    users: int
    fitted: bool
    tpot: float
    predicted_tpot: float
    ttft: float = 0.0
    predicted_ttft: float = 0.0
    rate: float = 0.0
    predicted_rate: float = 0.0


def spec_of(name: str) -> ModelSpec:
    """Return the model of a row; raises UnknownName for one that is no preset."""
    candidates = [name]
    for _ in range(3):
        shorter = next((candidates[-1].removesuffix(end) for end in ENDINGS if candidates[-1].endswith(end)), None)
        if shorter is None:
            break
        candidates.append(shorter)
    candidates = [SAME.get(one, one) for one in candidates]
    owners = ("Qwen/", "meta-llama/", "deepseek-ai/")
    candidates += [one.replace("nvidia/", owner) for one in candidates for owner in owners]
    candidates += [one + "-pt" for one in candidates] + [one.replace("Llama-3.3", "Llama-3.1") for one in candidates]
    for candidate in candidates:
        try:
            return lab.model(candidate)
        except UnknownName:
            continue
    raise UnknownName(f"{name} is no preset")


def service_of(row: dict[str, str]) -> lab.Service | None:
    """Return the Service of a row by the rule above; None for a row that it leaves out."""
    tp, ep, copies = (int(row[key] or 1) or 1 for key in ("tp", "ep", "attention_dp"))
    users = int(float(row["concurrency"]))
    if users_of_all := re.search(r"_c(\d+)_", row["id"]):
        copies, users = copies if int(row["attention_dp"] or 0) else int(users_of_all[1]) // users, int(users_of_all[1])
    tp = max(tp, ep, copies)
    if tp > 8 or ep not in (1, tp) or tp % copies:
        return None
    weights = "mxfp4" if "gpt-oss" in row["model"] else WEIGHTS.get(row["weights"], "bf16")
    cache = "fp8" if row["engine"] == "trtllm" and weights in ("fp8", "nvfp4") else "bf16"
    prompt, answer = int(row["isl"] or 512), round(float(row["osl"] or 1024))
    service = lab.Service(
        row["engine"], weights, cache, tp=tp, ep=ep, dp_attention=copies, prompt_len=prompt, output_len=max(1, answer),
        concurrency=users, max_num_batched_tokens=DEFAULT_TOKENS if row["engine"] == "vllm" else None,
    )  # fmt: skip
    if row["source"] != "InferenceX" or (prompt, answer) not in SHAPES:
        return service
    return replace(service, range_ratio=0.8, **_launched(row, service))


def _launched(row: dict[str, str], service: lab.Service) -> dict[str, Any]:
    """Return the options that InferenceX's script gave the server."""
    shape, users = f"{service.prompt_len}x{service.output_len}", service.concurrency or 1
    for script in scripts():
        if script["engine"] != row["engine"] or script["model"] not in row["model"]:
            continue
        allowed = (("gpus", row["gpu"]), ("weights", row["weights"]), ("shape", shape))
        if any(script[key] and value not in script[key].split() for key, value in allowed):
            continue
        if script["most_tp"] and service.tp > int(script["most_tp"]):
            continue
        if script["copies"] and service.dp_attention == 1:
            continue
        steps = [pair.split(":") for pair in script["interval"].split()]
        interval = [int(count) for least, count in steps if users >= int(least)]
        tokens = 2 * service.prompt_len if script["tokens"] == "2x" else int(script["tokens"])
        looks = interval[-1] if interval else 1
        return {"kv": script["kv"], "max_num_batched_tokens": tokens, "prefill_interval": looks}
    return {}


@cache
def scripts() -> list[dict[str, str]]:
    """Return the rows of launched.csv; of those that are of a deployment the first one counts."""
    with FILE.with_name("launched.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def numbered(row: dict[str, str]) -> int:
    """Return the number of a row, by which samples are drawn: the SHA-256 of its id."""
    return int(sha256(row["id"].encode()).hexdigest(), 16)


def fitted(row: dict[str, str]) -> bool:
    """Return whether constants may be fitted to a row; all others are reported."""
    return row["source"] == "InferenceX" and numbered(row) % FITTED == 0


def compared(every: int) -> Iterator[Row | str]:
    """Yield each row with its prediction, or why it has none."""
    with FILE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if (numbered(row) // FITTED) % every:
            continue
        service = service_of(row)
        if service is None:
            yield "several nodes, or another placement of experts"
            continue
        gpu = lab.gpu(GPUS.get(row["gpu"], row["gpu"]))
        try:
            spec = spec_of(row["model"])
            values = predicted(row, spec, service, gpu)
        except UnknownName:
            yield "the model has no preset in llmlab"
        except SpecError as error:
            yield str(error).split(":")[0]
        else:
            about = row["id"], row["source"], row["engine"], row["model"].split("/")[-1], row["gpu"]
            shape = service.prompt_len, service.output_len
            yield Row(*about, shape, service.concurrency or 1, fitted(row), float(row["tpot_ms"]) / 1e3, **values)


def predicted(row: dict[str, str], spec: ModelSpec, service: lab.Service, gpu: GPU) -> dict[str, float]:
    """Return the values of a Row that are predicted, and those measured beside them."""
    if row["source"] != "InferenceX":
        batch = max(1, round(float(row["id"].rpartition("b")[2])))
        step = Step(batch, service.prompt_len + service.output_len // 2)
        return {"predicted_tpot": sum(step_seconds(spec, service, gpu, step).values())}
    service = checked(spec, service, gpu)
    memory = divided_memory(spec, service, gpu)
    if not memory.requests:
        raise SpecError("out of memory")
    served = simulate(spec, service, gpu, memory)
    first, each = fmean(one.first_token for one in served), fmean(one.each_token for one in served)
    ttft, tpot = float(row["ttft_ms"]) / 1e3, float(row["tpot_ms"]) / 1e3
    return {
        "predicted_tpot": each, "ttft": ttft, "predicted_ttft": first,
        "rate": _rate(service, ttft, tpot), "predicted_rate": _rate(service, first, each),
    }  # fmt: skip


def _rate(service: lab.Service, ttft: float, tpot: float) -> float:
    users, answer = service.concurrency or 1, service.output_len
    return users * answer / (ttft + tpot * answer) / service.gpus


def line(words: str, ratios: Sequence[float], interval: tuple[float, float] | None = None) -> str:
    """Return a row of the table: predicted / measured."""
    off = sorted(abs(ratio - 1) for ratio in ratios)
    ranked = sorted(ratios)
    inside = sum(x <= 0.35 for x in off) / len(off)
    covered = ""
    if interval:
        covered = f"{sum(interval[0] <= 1 / ratio <= interval[1] for ratio in ratios) / len(off):.0%}"
    low, middle, high = (ranked[int(share * (len(ranked) - 1))] for share in (0.1, 0.5, 0.9))
    errors = f"{len(off)} | {median(off):.1%} | {inside:.0%}"
    return f"| {words} | {errors} | {low:.2f} | {middle:.2f} | {high:.2f} | {covered} |"


def ranked(rows: Sequence[Row]) -> tuple[int, int]:
    """Return in how many groups of deployments of a model on a GPU the fastest is among the first two predicted."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.model, row.gpu, row.shape].append(row)
    large = [group for group in groups.values() if len({round(row.rate, 1) for row in group}) >= 4]
    right = 0
    for group in large:
        first_two = sorted(group, key=lambda row: -row.predicted_rate)[:2]
        right += max(row.rate for row in group) <= max(row.rate for row in first_two)
    return right, len(large)


def beside(rows: Sequence[Row]) -> list[str]:
    """Return the lines of both predictions, ours and aiconfigurator's, for the rows that it was asked for."""
    with BESIDE.open(encoding="utf-8") as file:
        theirs = {row["id"]: (float(row["ttft_ms"]) / 1e3, float(row["tpot_ms"]) / 1e3) for row in csv.DictReader(file)}
    both = [row for row in rows if row.id in theirs]
    if not both:
        return []
    return [
        line("on aiconfigurator's rows, time per output token, lab.serve", [r.predicted_tpot / r.tpot for r in both]),
        line("the same, aiconfigurator 0.12", [theirs[r.id][1] / r.tpot for r in both]),
        line("on aiconfigurator's rows, time to the first token, lab.serve", [r.predicted_ttft / r.ttft for r in both]),
        line("the same, aiconfigurator 0.12", [theirs[r.id][0] / r.ttft for r in both]),
    ]  # fmt: skip


@click.command()
@click.option("--every", default=1, help="Compare every n-th row.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write serving.md into this folder.")
def main(every: int, out: Path | None) -> None:
    """Compare lab.serve with deployments that others measured."""
    from llmlab.serving.report import RATE_INTERVAL, TPOT_INTERVAL, TTFT_INTERVAL

    rows: list[Row] = []
    without: dict[str, int] = defaultdict(int)
    for row in compared(every):
        if isinstance(row, str):
            without[row] += 1
        else:
            rows.append(row)
    others = [row for row in rows if row.source == "InferenceX" and not row.fitted]
    energy = [row for row in rows if row.source != "InferenceX"]
    titles = ("predicted / measured", "rows", "off at the median", "within 35 %", "10 %", "median", "90 %",
              "inside the interval")  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    lines.append(line("time per output token", [r.predicted_tpot / r.tpot for r in others], TPOT_INTERVAL))
    lines.append(line("time to the first token", [r.predicted_ttft / r.ttft for r in others], TTFT_INTERVAL))
    lines.append(line("output tokens per second per GPU", [r.predicted_rate / r.rate for r in others], RATE_INTERVAL))
    if energy:
        lines.append(line("ML.ENERGY: time between tokens", [r.predicted_tpot / r.tpot for r in energy]))
    for value in sorted({row.engine for row in others}):
        part = [row for row in others if row.engine == value]
        for words, rows_of in (("InferenceX", True), ("aiconfigurator", False)):
            ratios = [r.predicted_ttft / r.ttft for r in part if (r.shape in SHAPES) == rows_of]
            if ratios:
                lines.append(line(f"time to the first token, {value}, {words}'s runs", ratios))
    for key in ("engine", "gpu", "model"):
        for value in sorted({getattr(row, key) for row in others}):
            ratios = [row.predicted_tpot / row.tpot for row in others if getattr(row, key) == value]
            lines.append(line(f"time per output token, {value}", ratios))
    lines += beside(others)
    right, groups = ranked(others)
    lines += ["", f"- The fastest deployment of a model on a GPU is among the first two predicted in {right} of "
              f"{groups} groups (same model, GPU and lengths; four deployments or more).",
              f"- Fitted on {sum(row.fitted for row in rows)} rows, which are not among the above."]  # fmt: skip
    with BESIDE.open(encoding="utf-8") as file:
        lines.append(f"- aiconfigurator was asked for every eighth row, and answered {sum(1 for _ in file) - 1}.")
    lines += [f"- Left out: {count} rows, {why}." for why, count in sorted(without.items())]
    title = "**lab.serve compared with measured deployments**"
    text = "\n".join([title, "", *lines, "", provenance("llmlab")])
    print(text)
    if out:
        write(out / "serving.md", text)


if __name__ == "__main__":
    main()
