"""lab.simulator against single operators measured on an A100: each is run as Liger-Kernel's scripts ran it.

    python -m benchmarks.agreement.operators                           # prints
    python -m benchmarks.agreement.operators --out benchmarks/results  # and writes operators.md

The rows are the published records of plain PyTorch (provider "huggingface") with a memory metric. What the scripts did
that memory depends on (linkedin/Liger-Kernel, benchmark/scripts, 0.2.1 and 0.4.2):

- `_test_memory` calls reset_peak_memory_stats, the run and max_memory_allocated ten times and takes the median. No
  gradient is set to None in between, so from the second run on every leaf has its gradient while backward makes the
  next.
- Liger's own module is on the card too, beside the one that runs.
- The timed runs come first, in the same process, so both cuBLAS workspaces, forward's and backward's, exist already.
- The embedding script also runs torch.compile, which leaves much on the card: the whole script is simulated
  (embedding_script.py).

    B  batch    T  tokens per sequence    V  vocabulary    H, D, N  width    M  rows
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

import llmlab as lab
from benchmarks.agreement.embedding_script import COMPILATIONS, DROPS, simulate_script
from benchmarks.provenance import provenance, table, write
from llmlab.archive import OperatorRecord, operator_records
from llmlab.base.units import MiB

PLAIN = "huggingface"  # the scripts' name for plain PyTorch
GPU = "A100-80GB"
HEADER = ["operator, mode", "rows", "exact to the byte", "largest error"]
EMBEDDING = (
    "We simulate the whole embedding script, because its runs under torch.compile leave tables on the GPU. No source "
    "says when they are freed. From the script's rows, we infer that this happens at compilations "
    f"{' and '.join(map(str, DROPS))} of {COMPILATIONS}."
)
HOLE = 8 * MiB
HOLES = (
    f"One row is too low: its request of {{}} B received a free block of {HOLE // MiB} MiB, and the allocator does not "
    "split off a rest of less than 1 MiB. In the simulated process no block of that size is free."
)
REPEATS = 3  # of the ten runs: the first has no gradients yet, the others are alike
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, None: torch.float32}

Step = Callable[[], Any]


class Operator(NamedTuple):
    """What a script timed and measured: `forward`, or `full`, with backward; `kept` are other tensors on the card."""

    forward: Step
    backward: Callable[[Any], None]
    kept: Any = None

    def full(self) -> None:
        self.backward(self.forward())


class Result(NamedTuple):
    """One record and the bytes simulated for it."""

    record: OperatorRecord
    simulated: int

    @property
    def error(self) -> int:
        return as_published(self.simulated) - int(self.record.value)


def as_published(size: int) -> int:
    """Return `size` as `_test_memory` keeps it: MiB in fp32, which has 24 bits."""
    return int(torch.tensor(size / MiB, dtype=torch.float32).item() * MiB)


# ---- the scripts


def cross_entropy(dtype: torch.dtype, V: int, B: int, T: int) -> Operator:
    logits = torch.randn(B * T, V, requires_grad=True, device="cuda")
    target = torch.randint(V, (B * T, 1), device="cuda").squeeze(1)
    loss = nn.CrossEntropyLoss()
    return Operator(lambda: loss(logits, target), Tensor.backward)


def fused_linear_cross_entropy(dtype: torch.dtype, BT: int, H: int, V: int, **_: Any) -> Operator:
    linear, other = (nn.Linear(H, V, bias=False, dtype=dtype).cuda() for _ in range(2))
    x = torch.randn(BT, H, requires_grad=True, dtype=dtype, device="cuda")
    target = torch.randint(V, (BT, 1), device="cuda").squeeze(1)
    loss = nn.CrossEntropyLoss()
    return Operator(lambda: loss(linear(x), target), Tensor.backward, other)


def embedding(dtype: torch.dtype, V: int, B: int, T: int, D: int) -> Operator:
    table, other = (nn.Embedding(V, D).cuda() for _ in range(2))
    ids = torch.randint(0, V, (B, T), device="cuda")
    return Operator(lambda: table(ids), lambda y: y.backward(torch.randn_like(y)), other)


def gated_mlp(
    dtype: torch.dtype, T: int, hidden_size: int, intermediate_size: int, hidden_act: str, **batch: int
) -> Operator:
    (B,) = batch.values()
    config = LlamaConfig(hidden_size=hidden_size, intermediate_size=intermediate_size, hidden_act=hidden_act)
    x = torch.randn(B, T, hidden_size, device="cuda", dtype=dtype, requires_grad=True)
    mlp = LlamaMLP(config).cuda().to(dtype)
    return Operator(lambda: mlp(x), lambda y: y.backward(torch.randn_like(y), retain_graph=True))


def layer_norm(dtype: torch.dtype, N: int, M: int, eps: float) -> Operator:
    norm, other = (nn.LayerNorm(N, eps=eps).cuda() for _ in range(2))
    return _normalized(norm, other, torch.randn(M, N, dtype=dtype, device="cuda"))


def rms_norm(dtype: torch.dtype, H: int, M: int, eps: float) -> Operator:
    weight, other = (nn.Parameter(torch.ones(H)).cuda().detach().requires_grad_() for _ in range(2))

    def norm(x: Tensor) -> Tensor:  # transformers' LlamaRMSNorm, with a weight in fp32
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + eps)
        return weight * wide.to(x.dtype)

    return _normalized(norm, other, torch.randn(M, H, dtype=dtype, device="cuda"))


def _normalized(norm: Callable[[Tensor], Tensor], other: Any, x: Tensor) -> Operator:
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return Operator(lambda: norm(x), lambda y: y.backward(dy, retain_graph=True), other)


def rope(dtype: torch.dtype, num_q_heads: int, num_kv_heads: int, **sizes: int) -> Operator:
    T = sizes.get("seq_len") or sizes["T"]
    D = (sizes.get("hidden_size") or sizes["H"]) // num_q_heads
    frequencies = 1.0 / 10000 ** (torch.arange(0, D, 2, dtype=torch.int64).float().cuda() / D)  # LlamaRotaryEmbedding's
    q, k = (
        torch.randn(1, T, heads, D, device="cuda", requires_grad=True, dtype=dtype).transpose(1, 2)
        for heads in (num_q_heads, num_kv_heads)
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(T, device="cuda").unsqueeze(0)
    angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)  # (1, T, D / 2), by cuBLAS
    cos, sin = (torch.cat((part, part), dim=-1).to(dtype) for part in (angles.cos(), angles.sin()))
    del angles
    return Operator(
        lambda: apply_rotary_pos_emb(q, k, cos, sin),
        lambda y: torch.autograd.grad(y, (q, k), (dq, dk), allow_unused=True, retain_graph=True),
        (frequencies, positions),
    )


OPERATORS = {
    "cross_entropy": cross_entropy,
    "embedding": embedding,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "geglu": gated_mlp,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "rope": rope,
    "swiglu": gated_mlp,
}


# ---- measurements as the scripts made them


def simulate_operator(record: OperatorRecord) -> int:
    """Return the bytes that the script would have measured for the record on the simulated card."""
    if record.operator == "embedding":
        return simulate_script(record.gpu)[record.provider, record.sizes["D"], record.sizes["V"]]
    with lab.simulator(record.gpu) as sim:
        make(record).full()  # the timed runs, on tensors of their own
        operator = make(record)
        if record.mode == "backward":
            step: Step = partial(operator.backward, operator.forward())
        else:
            step = operator.forward if record.mode == "forward" else operator.full
        found = []
        for _ in range(REPEATS):
            sim.reset_peak()
            step()
            found.append(sim.peak_allocated)
    return int(median(found))


def compare(record: OperatorRecord) -> Result:
    """Return the record beside its simulation."""
    return Result(record, simulate_operator(record))


def make(record: OperatorRecord) -> Operator:
    options = {name: value for name, value in record.options.items() if name != "mode"}
    return OPERATORS[record.operator](DTYPES[record.dtype], **record.sizes, **options)


def plain_rows() -> list[OperatorRecord]:
    """Return the published memory of plain PyTorch on the A100."""
    return operator_records(provider=PLAIN, metric="memory", gpu=GPU)


def body(results: list[Result]) -> list[list[str]]:
    """Return the table's rows: one per operator and mode, and one for all."""
    of = lambda result: f"{result.record.operator}, {result.record.mode}"  # noqa: E731
    groups = [(name, list(group)) for name, group in groupby(sorted(results, key=of), key=of)]
    return [_row(name, group) for name, group in [*groups, ("all", results)]]


def _row(name: str, results: list[Result]) -> list[str]:
    worst = max((result.error for result in results), key=abs)
    exact = sum(result.error == 0 for result in results)
    return [name, str(len(results)), str(exact), f"{worst:+,} B" if worst else "0"]


def to_markdown(results: list[Result], made: str) -> str:
    """Return the table, its sources, and the line that says what made it."""
    sources = sorted({result.record.citation for result in results})
    holes = [HOLES.format(f"{HOLE + result.error:,}") for result in results if -MiB <= result.error < 0]
    notes = [f"- {note}" for note in (EMBEDDING, *holes, *(f"Source: {source}" for source in sources))]
    title = f"**Simulated against measured, {len(results)} single operators of plain PyTorch on an {GPU}**"
    return "\n".join([title, "", *table(HEADER, body(results)), "", *notes, "", made])


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write operators.md to.")
def main(out: Path | None) -> None:
    """Compare the simulated card with the published operators."""
    results = [compare(record) for record in plain_rows()]
    for result in results:
        if result.error:
            sizes = ", ".join(f"{name}={size}" for name, size in result.record.sizes.items())
            print(f"{result.record.operator} {sizes}: {result.error:+,} B")
    text = to_markdown(results, provenance("llmlab", "torch", "transformers"))
    print(text)
    if out:
        write(out / "operators.md", text)


if __name__ == "__main__":
    main()
