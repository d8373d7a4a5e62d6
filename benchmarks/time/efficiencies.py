"""Derive llmlab/hardware/efficiencies.toml, the rates that cards reach, from the published records; and validate it.

    python -m benchmarks.time.efficiencies          # derives, cross-validates, prints
    python -m benchmarks.time.efficiencies --write  # and writes the table

Each record is a time. The simulator says which kernels ran in it; the rates are those with which the sums of the
kernels' times (`llmlab.formulas.time.operators`) fit the records best: least squares of logarithms, where large
errors count linearly, because single runs were disturbed. The H100's rates, and attention's, are those of kernels that
NVIDIA measured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch

import llmlab as lab
from benchmarks.agreement import operators as scripts
from llmlab import Training
from llmlab.archive import OperatorRecord, figure, held_out, operator_records, records
from llmlab.archive.published_steps import gpt
from llmlab.formulas.time.efficiency import Efficiency
from llmlab.formulas.time.kernels import kernels, training_rates
from llmlab.formulas.time.operators import host_seconds, kernel_seconds
from llmlab.hardware.gpu import gpu
from llmlab.simulation.profile.operator_log import Operators
from llmlab.simulation.report import recorded
from llmlab.specs.model import model
from llmlab.traces.kernels import Kernel

TABLE = Path(lab.__file__).parent / "hardware" / "efficiencies.toml"
MiB = 2**20
FLUSHED = 256 * MiB  # triton.testing.do_bench clears the cache before each run; meanwhile the CPU launches kernels
TOLERATED = 0.15  # relative error up to which it counts as a square
FOLDS = 5
PRIOR = 0.1  # weight of a value's distance from its start: it decides values that few records depend on

# Not fitted. Launch: the time of an empty kernel. VIEW and BACKWARD are shares of the time that dispatching an operator
# with a kernel takes: for a view, and for an operator in backward, which autograd's engine calls without Python.
# Caches: NVIDIA's white papers; an A100 has two of 20 MiB.
FIXED = {"launch": 2e-6}
VIEW, BACKWARD = 0.15, 0.6
START = {
    "T4": {
        "bandwidth": 2e11, "matmul.fp16": 2e13, "matmul.fp32": 4e12, "attention.fp16": 9e12, "attention.fp32": 2e12,
        "dispatch": 4e-5, "custom": 1.5e-4,
    },
    "A100-80GB": {
        "bandwidth": 1.4e12, "strided": 1e12, "gather": 6e11, "matmul.bf16": 2.6e14, "serial": 2e-8, "dispatch": 2.5e-5,
    },
}  # fmt: skip
CACHE = {"T4": 4 * MiB, "A100-80GB": 20 * MiB, "H100-80GB": 25 * MiB}


class Row(NamedTuple):
    """A record: its kernels with the number of each, not whole where layers were extrapolated, and its seconds."""

    name: str
    group: str
    kernels: dict[Kernel, float]
    seconds: float
    ahead: int = 0  # bytes that the card wrote before it, while the CPU launched its kernels

    def time(self, rates: Efficiency) -> float:
        """Return the seconds that `rates` give: the card's, or the host's if they are more."""
        card = sum(count * (kernel_seconds(kernel, rates) or 0.0) for kernel, count in self.kernels.items())
        host = sum(count * host_seconds(kernel, rates) for kernel, count in self.kernels.items())
        return max(card, host - self.ahead / rates.bandwidth)


# ---- records


def finetuning_rows(few: int | None = None) -> list[Row]:
    """Return the T4's timed steps, repeats as their mean; with `few` at most that many."""
    measured: dict[tuple[str, Training], list[float]] = {}
    for report in records(gpu="T4"):
        if report.gpu == "T4" and report.source == "published" and report.step_seconds and not held_out(report):
            measured.setdefault((report.model, report.run), []).append(report.step_seconds)
    chosen = list(measured.items())
    if few:
        chosen = chosen[:: -(-len(chosen) // few)]
    rows = []
    for (name, run), seconds in chosen:
        label = f"{name} {run.quantization} {run.attention} {run.micro_batch}×{run.seq_len}"
        rows.append(Row(label, name, step_kernels(name, run, "T4"), float(np.mean(seconds))))
    return rows


def step_kernels(name: str, run: Training, card: str) -> dict[Kernel, float]:
    """Return the kernels of a step, from models of 1 and 2 layers: each further layer adds what the second one did."""
    config = model(name).config
    layers = config["num_hidden_layers"]
    one, two = (_counted(recorded({**config, "num_hidden_layers": n}, run, card).operators) for n in (1, 2))
    more = layers - 1
    return {k: two.get(k, 0) * more - one.get(k, 0) * (more - 1) for k in two.keys() | one.keys()}


def _counted(kernels: Sequence[Kernel]) -> Counter:
    return Counter(kernel._replace(phase="") for kernel in kernels)


def operator_rows(every: int = 1) -> list[Row]:
    """Return the A100's single operators of plain PyTorch; with `every` = n only each n-th."""
    rows = []
    for record in operator_records(provider="huggingface", metric="time", gpu="A100-80GB")[::every]:
        group = f"{record.operator} {record.mode}"
        sizes = ", ".join(f"{name}={size}" for name, size in record.sizes.items())
        rows.append(Row(f"{group} {sizes}", group, _counted(operator_kernels(record)), record.value, FLUSHED))
    return rows


def operator_kernels(record: OperatorRecord) -> Operators:
    """Return the kernels of what the benchmark's script timed, from its second run on."""
    with lab.simulator(record.gpu) as sim:
        operator = scripts.make(record)
        operator.full()
        made = operator.forward()
        with sim.operators() as kernels:
            if record.mode != "backward":
                made = operator.forward()
            if record.mode != "forward":
                operator.backward(made)
    return kernels


class Throughput(NamedTuple):
    """A published training run: tokens per second and GPU."""

    name: str
    card: str
    config: dict[str, Any]
    run: Training
    tokens_per_second: float


def throughputs() -> list[Throughput]:
    """Return the published training throughputs whose set-up is known.

    llm-foundry's micro-batches and gradient accumulation are those of its table, FULL_SHARD on 8 GPUs under amp_bf16.
    FlashAttention-2's rates count 6ND + 12·L·h·T² FLOP; its micro-batch is not published. llm.c's kernels are fused,
    as a compiler's are.
    """
    foundry, mixed = figure("llm-foundry-throughput"), figure("flash-attention-training")
    shard: dict[str, Any] = {"seq_len": 2048, "precision": "autocast-bf16", "dp": 8, "zero": 3}
    seven, one, small = gpt(4096, 32, 32), gpt(2048, 24, 16), gpt(768, 12, 12)
    found = [
        Throughput("llm-foundry 7B", "H100-80GB", seven, Training(micro_batch=6, **shard), foundry["7B, H100"]),
        Throughput("llm-foundry 1B", "H100-80GB", one, Training(micro_batch=14, **shard), foundry["1B, H100"]),
    ]
    for label, config, micro_batch, accumulation in (("7B", seven, 6, 2), ("1B", one, 14, 4), ("125M", small, 40, 2)):
        run = Training(micro_batch=micro_batch, accumulation=accumulation, **shard)
        found.append(Throughput(f"llm-foundry {label}", "A100-80GB", config, run, foundry[f"{label}, A100"]))
    nano = Training(micro_batch=20, seq_len=1024, accumulation=5, precision="autocast-bf16")
    short = gpt(768, 12, 12, 50304, 1024)
    rate = 100 * 1024 / figure("gpt2-step-time-nanogpt").value
    found.append(Throughput("nanoGPT 124M", "A100-80GB", short, nano, rate))
    steps, tokens = figure("gpt2-step-time-llmc"), figure("gpt2-tokens-a-step-llmc")
    half: dict[str, Any] = {"seq_len": 1024, "precision": "mixed-bf16", "dp": 8, "compile": True, "attention": "flash"}
    rate = tokens["124M"] / 8 / steps["124M, 8 × A100"]
    found.append(Throughput("llm.c 124M", "A100-80GB", short, Training(micro_batch=64, **half), rate))
    rate = tokens["1558M"] / 8 / steps["1558M, 8 × H100"]
    large, run = gpt(1600, 48, 25, 50304, 1024), Training(micro_batch=16, accumulation=8, **half)
    found.append(Throughput("llm.c 1558M", "H100-80GB", large, run, rate))
    for label, length, micro_batch in (("2k", 2048, 8), ("8k", 8192, 2)):
        config = gpt(2048, 24, 16, 50257, length)
        flop = 6 * model(config).parameters + 12 * 24 * 2048 * length  # per token
        run = Training(micro_batch=micro_batch, seq_len=length, precision="mixed-bf16", dp=8)
        rate = mixed[f"{label}, FlashAttention-2"] / flop
        found.append(Throughput(f"FlashAttention-2 1.3B, {label}", "A100-80GB", config, run, rate))
    return found


def estimated_rate(row: Throughput) -> float:
    """Return the tokens per second and GPU that `llmlab.estimate` gives, from kernels that were measured."""
    tokens = lab.estimate(row.config, row.run, row.card).tokens_per_second
    assert tokens
    return tokens / row.run.world_size


# ---- the fit


def rates_of(card: str, values: dict[str, float]) -> Efficiency:
    """Return the Efficiency of fitted values, "matmul.fp16" being an entry of a table."""
    fields: dict[str, Any] = {**FIXED, "cache": CACHE[card], "derived": str(date.today())}
    for name, value in values.items():
        table, _, dtype = name.partition(".")
        if dtype:
            fields.setdefault(table, {})[dtype] = value
        else:
            fields[table] = value
    for name in ("strided", "gather"):
        fields.setdefault(name, fields["bandwidth"])
    fields.setdefault("dispatch", 0.0)
    fields |= {"view": VIEW * fields["dispatch"], "backward_dispatch": BACKWARD}
    return Efficiency(gpu=card, sms=gpu(card).sms, **fields)


def fit(start: dict[str, float], errors: Callable[[dict[str, float]], np.ndarray], steps: int = 20) -> dict[str, float]:
    """Return the values that make `errors`, logarithms of ratios, smallest: Levenberg-Marquardt on Huber's loss."""
    names = list(start)

    def at(x: np.ndarray) -> np.ndarray:
        return errors(dict(zip(names, np.exp(x).tolist(), strict=True)))

    def cost(r: np.ndarray) -> float:
        a = np.abs(r)
        return float(np.where(a < TOLERATED, a * a / 2, TOLERATED * (a - TOLERATED / 2)).sum())

    x, damping = np.log(list(start.values())), 1e-2
    r = at(x)
    for _ in range(steps):
        J = np.stack([(at(x + 1e-3 * unit) - r) / 1e-3 for unit in np.eye(len(x))], axis=1)
        weight = np.minimum(1, TOLERATED / np.maximum(np.abs(r), 1e-9))
        A, b = J.T @ (weight[:, None] * J), J.T @ (weight * r)
        for _ in range(6):
            move = np.clip(-np.linalg.solve(A + damping * np.diag(np.diag(A) + 1e-3), b), -0.7, 0.7)
            new = at(x + move)
            if cost(new) < cost(r):
                break
            damping *= 4
        else:
            break
        gained = cost(r) - cost(new)
        x, r, damping = x + move, new, damping / 3
        if gained < 1e-6:
            break
    return dict(zip(names, np.exp(x).tolist(), strict=True))


def derive(card: str, rows: Sequence[Row]) -> dict[str, float]:
    """Return the card's values from rows of kernels."""

    def errors(values: dict[str, float]) -> np.ndarray:
        rates = rates_of(card, values)
        away = [PRIOR * np.log(value / START[card][name]) for name, value in values.items()]
        return np.array([np.log(row.time(rates) / row.seconds) for row in rows] + away)

    return fit(START[card], errors)


def relative_errors(rows: Sequence[Row], rates: Efficiency) -> np.ndarray:
    return np.array([row.time(rates) / row.seconds - 1 for row in rows])


def cross_validated(card: str, rows: Sequence[Row]) -> np.ndarray:
    """Return the errors of all rows, each predicted from the folds that it is not in."""
    order = np.random.default_rng(0).permutation(len(rows))
    errors = []
    for fold in range(FOLDS):
        out = set(order[fold::FOLDS].tolist())
        rates = rates_of(card, derive(card, [row for i, row in enumerate(rows) if i not in out]))
        errors.append(relative_errors([rows[i] for i in sorted(out)], rates))
    return np.concatenate(errors)


def measured_attention(card: str) -> float:
    """Return FlashAttention 2's FLOP/s, forward and backward, in steps that last: 8 sequences of 2048, 32 heads of 128,
    of which the half that is not masked counts."""
    found = kernels(card)
    forward = found.attention(8, 32, 2048, 128, "flash", "bf16")
    return 3.5 * 2 * 8 * 32 * 2048**2 * 128 / (forward * (1 + found.backward("flash")))


def derive_h100() -> dict[str, float]:
    """Return the H100's values: products as measured, at the clocks that last (training.toml), attention as published;
    bandwidth is the share of the data sheet that the other cards reach."""
    published = figure("flash-attention-3-forward").values
    attention = float(np.mean([value for name, value in published.items() if name.startswith("FlashAttention-2")]))
    product = kernels("H100-80GB").matmul(8192, 8192, 8192, "bf16")
    assert product
    bandwidth = training_rates()["share"]["bandwidth"] * gpu("H100-80GB").bandwidth
    return {"bandwidth": bandwidth, "matmul.bf16": 2 * 8192**3 / product, "attention.bf16": attention}


# ---- the table

ENTRY = """
[[efficiency]]
gpu = {gpu}
derived_from = {derived_from}
validated = {validated}
derived = {derived}
"""


def entry(card: str, values: dict[str, float], derived_from: str, validated: str) -> str:
    """Return the card's lines of TOML; values to three digits."""
    rates = rates_of(card, values)
    lines = [
        ENTRY.format(
            gpu=json.dumps(card), derived_from=json.dumps(derived_from, ensure_ascii=False),
            validated=json.dumps(validated, ensure_ascii=False), derived=json.dumps(rates.derived),
        ).strip()
    ]  # fmt: skip
    for name in ("bandwidth", "strided", "gather", "matmul", "attention", "launch", "serial", "dispatch", "view",
                 "backward_dispatch", "custom", "cache"):  # fmt: skip
        value = getattr(rates, name)
        if isinstance(value, dict):
            if value:
                lines.append(f"{name} = {{ {', '.join(f'{dtype} = {rate:.3g}' for dtype, rate in value.items())} }}")
        elif value:
            lines.append(f"{name} = {value if name == 'cache' else format(value, '.3g')}")
    return "\n".join(lines)


HEAD = """\
# What cards reach, derived from published records by benchmarks/time/efficiencies.py; don't edit by hand. A card that
# is not here has no record from which its rates follow: hardware/training.toml has what stands for them. Units:
# bytes/s, FLOP/s, s, bytes; the fields are those of llmlab.formulas.time.efficiency.Efficiency.
"""


def summary(errors: np.ndarray) -> str:
    return f"median {np.median(np.abs(errors)):.1%}, worst {np.abs(errors).max():.0%}"


@click.command()
@click.option("--write", "written", is_flag=True, help="Write the table.")
def main(written: bool) -> None:
    """Derive the table and say how well it holds."""
    torch.set_num_threads(1)
    rows = {"T4": finetuning_rows(), "A100-80GB": operator_rows()}
    values = {card: derive(card, found) for card, found in rows.items()}
    values["A100-80GB"]["attention.bf16"] = measured_attention("A100-80GB")
    values["H100-80GB"] = derive_h100()
    runs = throughputs()
    off = {card: np.array([estimated_rate(row) / row.tokens_per_second - 1 for row in runs if row.card == card])
           for card in ("A100-80GB", "H100-80GB")}  # fmt: skip
    sources = {
        "T4": f"{len(rows['T4'])} LoRA and QLoRA steps, llmlab/archive/t4/published-finetuning.json",
        "A100-80GB": f"{len(rows['A100-80GB'])} operators of plain PyTorch, "
        "llmlab/archive/a100-80gb/published-operators.json; attention: llmlab/hardware/kernels",
        "H100-80GB": "matmuls: llmlab/hardware/kernels at the clocks of training.toml; FlashAttention-2's forward "
        "rate, llmlab/archive/published-figures.json; nothing says what its host takes, so the simulator gives no time",
    }
    held = {}
    for card, found in rows.items():
        fitted = summary(relative_errors(found, rates_of(card, values[card])))
        held[card] = f"fitted: {fitted}; rows left out, {FOLDS} folds: {summary(cross_validated(card, found))}"
    held["A100-80GB"] += f"; {len(off['A100-80GB'])} training runs: {summary(off['A100-80GB'])}"
    held["H100-80GB"] = f"{len(off['H100-80GB'])} training runs: {summary(off['H100-80GB'])}"
    text = (
        "\n\n".join([HEAD.rstrip(), *(entry(card, values[card], sources[card], held[card]) for card in values)]) + "\n"
    )
    print(text)
    for row in runs:
        rate = estimated_rate(row)
        print(f"{row.name} on {row.card}: {rate:,.0f} tokens/s and GPU, published {row.tokens_per_second:,.0f}: "
              f"{rate / row.tokens_per_second - 1:+.1%}")  # fmt: skip
    if written:
        TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
