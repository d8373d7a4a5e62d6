"""lab.simulator against memory that others measured, on other cards with other models, and published with the code.

    python -m benchmarks.memory.published                           # prints
    python -m benchmarks.memory.published --out benchmarks/results  # and writes published.md

Each row is run as its script ran (lora_script, gpt_scripts, and the operators below). PyTorch was older, and did two
things differently:

- cuBLASLt's workspace, for a product with a bias, was allocated in each product and freed at its end (1.13 to 2.6:
  aten/src/ATen/cuda/CUDABlas.cpp, gemm_and_bias); today each handle keeps one. Liger's rows have no such product.
- before 2.0 optimizers and clipping worked on one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn

import llmlab as lab
from benchmarks.memory.gpt_scripts import NANO, XL, Changes, train_book, train_mingpt
from benchmarks.memory.lora_script import fine_tune
from benchmarks.provenance import provenance, titled_table, write
from llmlab.archive import figure
from llmlab.hardware.gpu import GPU
from llmlab.simulation.workspaces.matmul import CUBLASLT
from llmlab.simulation.workspaces.registry import FREE, WORKSPACES, Operator, Step, Workspace

HEADER = ["what", "card", "of", "measured", "simulated", "error"]
OPERATORS_HEADER = ["operator", "card", "rows", "from", "to", "largest error"]
LOOPS = {"litgpt-lora-memory": "Lit-GPT, LoRA", "mingpt-memory": "minGPT", "llms-from-scratch-memory": "GPT-2 124M"}
OPERATOR_FIGURE = "liger-operators-memory"
REPEATS = 3  # of ten calls: from the second on the leaves have gradients


class Row(NamedTuple):
    """A published value, in a figure of the records, and what to run for it; `older`: PyTorch was older than 2.7."""

    figure: str
    label: str
    card: str
    run: Callable[[], Any]
    of: str = "allocated"
    older: bool = False

    @property
    def measured(self) -> int:
        return int(figure(self.figure)[self.label])


def given_back(function: Workspace) -> Workspace:
    """Return the workspace function of a kernel that frees cuBLASLt's workspace when it ends."""

    def steps(op: Operator, gpu: GPU) -> Iterator[Step]:
        for step in function(op, gpu):
            if step == CUBLASLT:
                yield from (CUBLASLT.size, FREE)
            else:
                yield step

    return steps


OLDER = {name: given_back(function) for name, function in WORKSPACES.items()}


def simulated(row: Row) -> int:
    """Return the bytes of the simulated peak, allocated or reserved."""
    with lab.simulator(row.card) as sim:
        if row.older:
            sim._simulated.engine.workspaces = OLDER
        row.run()
        return sim.peak_reserved if row.of == "reserved" else sim.peak_allocated


# ---- single operators, as Liger-Kernel's scripts run them


def repeat(forward: Callable[[], Tensor], gradient: Tensor | None = None) -> None:
    def call() -> None:
        y = forward()
        y.backward(gradient, retain_graph=True)

    for _ in range(REPEATS):
        call()


def group_norm(C: int) -> None:
    norms = [nn.GroupNorm(C // 4, C, eps=1e-6).cuda() for _ in range(2)]  # Liger's is on the card too
    x = torch.randn(128, C, 512, device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    repeat(lambda: norms[0](x), gradient)


def rms_norm(H: int) -> None:
    norm = nn.RMSNorm(H, eps=1e-6).cuda().to(torch.bfloat16)
    x = torch.randn(4096, 1, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def call() -> None:
        y = norm(x)  # stays until the call returns
        y.sum().backward()

    for _ in range(REPEATS):
        call()


def divergence(kind: str, rows: int, V: int) -> None:
    """kl_div, jsd and tvd of two distributions over V; backward goes on through the input's softmax to the logits."""
    to_log = kind != "tvd"
    logits = torch.randn(rows, V, requires_grad=True, device="cuda")
    given = logits.log_softmax(-1) if to_log else logits.softmax(-1)
    target = torch.randn(rows, V, device="cuda")
    target = target.log_softmax(-1) if kind == "jsd" else target.softmax(-1)
    del logits
    if kind == "kl_div":
        loss = nn.KLDivLoss(reduction="batchmean")
        repeat(lambda: loss(given, target))
    elif kind == "tvd":
        repeat(lambda: total_variation(given, target))
    else:
        repeat(lambda: jensen_shannon(given, target))


def total_variation(given: Tensor, target: Tensor) -> Tensor:
    distance = torch.abs(given - target) / 2.0
    return torch.sum(distance) / given.shape[0]


def jensen_shannon(log_q: Tensor, log_p: Tensor) -> Tensor:
    divergence = nn.KLDivLoss(reduction="batchmean", log_target=True)
    middle = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
    return 0.5 * divergence(torch.log(middle), log_p) + 0.5 * divergence(torch.log(middle), log_q)


OPERATORS: dict[str, Callable[[int], None]] = {
    "group_norm": group_norm,
    "rms_norm of torch": rms_norm,
    "kl_div": partial(divergence, "kl_div", 16384),
    "tvd": partial(divergence, "tvd", 16384),
    "jsd": partial(divergence, "jsd", 8192),
}


# ---- the rows


def operator_rows() -> list[Row]:
    rows = []
    for label in figure(OPERATOR_FIGURE).values:
        name, card, size = label.split(", ")
        rows.append(Row(OPERATOR_FIGURE, label, card, partial(OPERATORS[name], int(size.split()[1]))))
    return rows


def litgpt_rows() -> list[Row]:
    rows = []
    for label in figure("litgpt-lora-memory").values:
        name, batch = label.split(", ")
        rows.append(Row("litgpt-lora-memory", label, "A100-40GB", partial(fine_tune, name, int(batch)), older=True))
    return rows


def gpt_rows() -> list[Row]:
    rows = [
        Row("mingpt-memory", f"{name}{', early' * early}", "A100-80GB", partial(train_mingpt, size, early), older=True)
        for name, size in (("gpt-nano", NANO), ("gpt2-xl", XL))
        for early in (False, True)
    ]
    changes = [
        Changes(),
        Changes(mask=True),
        Changes(mask=True, fused_optimizer=True),
        Changes(mask=True, fused_optimizer=True, dtype=torch.bfloat16),
        Changes(mask=True, fused_optimizer=True, dtype=torch.bfloat16, classes=True),
        Changes(mask=True, fused_optimizer=True, dtype=torch.bfloat16, classes=True, attention=True),
    ]
    for label, made in zip(figure("llms-from-scratch-memory").values, changes, strict=True):
        run = partial(train_book, made)
        rows.append(Row("llms-from-scratch-memory", label, "A100-80GB", run, "reserved", older=True))
    return rows


def rows() -> list[Row]:
    """Return all rows, the operators last."""
    return [*litgpt_rows(), *gpt_rows(), *operator_rows()]


def sizes_of(group: list[tuple[Row, int]]) -> list[str]:
    """Return the number of rows of one operator, their least and largest bytes, and the largest error."""
    measured = [row.measured for row, _ in group]
    worst = max((size / row.measured - 1 for row, size in group), key=abs)
    return [str(len(group)), f"{min(measured):,}", f"{max(measured):,}", f"{worst:+.4%}"]


def to_markdown(found: dict[Row, int], made: str) -> str:
    """Return the tables of the simulated bytes, the sources of the rows, and the line that says what made it."""
    body, operators = [], {}
    for row, size in found.items():
        if row.figure == OPERATOR_FIGURE:
            operators.setdefault((row.label.partition(",")[0], row.card), []).append((row, size))
        else:
            what, error = f"{LOOPS[row.figure]}: {row.label}", f"{size / row.measured - 1:+.3%}"
            body.append([what, row.card, row.of, f"{row.measured:,}", f"{size:,}", error])
    text = titled_table("Training loops, simulated against published, bytes", HEADER, body)
    lines = [[name, card, *sizes_of(group)] for (name, card), group in operators.items()]
    text += titled_table("Single operators, allocated bytes", OPERATORS_HEADER, lines)
    for key in dict.fromkeys(row.figure for row in found):
        said = figure(key)
        text.append(f"- {said.setup}. Source: {said.source}. {' '.join(said.notes)}")
    return "\n".join([*text, "", made])


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write published.md to.")
def main(out: Path | None) -> None:
    """Compare the simulated cards with what others published."""
    text = to_markdown({row: simulated(row) for row in rows()}, provenance("llmlab", "torch"))
    print(text)
    if out:
        write(out / "published.md", text)


if __name__ == "__main__":
    main()
