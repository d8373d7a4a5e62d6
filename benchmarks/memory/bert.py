"""lab.simulator against the training memory of BERT-large on a V100, as the transformers documentation shows it.

    python -m benchmarks.memory.bert                           # prints
    python -m benchmarks.memory.bert --out benchmarks/results  # and writes bert.md, which the book includes

The source (perf_train_gpu_one, transformers 4.27) shows the memory in use after a run of Trainer, as NVML reports it:
the most that the allocator reserved, plus the CUDA context. It also shows the context alone, with the segment of the
1 × 1 tensor that was made to create it. The output of nvidia-smi on the page is from 11 January 2022, so transformers
was a release of that time, and the rows show that PyTorch was older than 1.10. The code below reproduces what differs
from today's releases:

- softmax keeps its input for backward, besides its output, so eager attention keeps one more tensor of B × H × T × T:
  before PyTorch 1.11, _softmax_backward_data takes that input and not only its dtype (tools/autograd/derivatives.yaml;
  issue pytorch#64000; transformers' pytorch_utils.softmax_backward_data calls both forms);
- GELU is on autocast's list of operators in fp32, so it keeps its input in fp32, and its output stays in memory in fp32
  until it is cast down; pytorch#59639 of June 2021, after 1.9, removed it from the list
  (aten/src/ATen/autocast_mode.cpp);
- the optimizer is transformers' own AdamW, one parameter at a time; gradients are zeroed, not set to None;
- BERT's mask is fp32 and always added.

    B  batch    H  heads    T  tokens per sequence    D  head size
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import BertConfig, BertForSequenceClassification
from transformers.activations import GELUActivation
from transformers.models.bert import modeling_bert
from transformers.optimization import Adafactor

import llmlab as lab
from benchmarks.provenance import provenance, table, write
from llmlab.archive import figure
from llmlab.base.units import MiB
from llmlab.simulation.allocator.caching import SMALL_SEGMENT

GPU = "V100-16GB"
T, ACCUMULATION = 512, 4
BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LOADED = "weights loaded"  # the line before any training
HEADER = ["set-up", "measured, without context", "simulated reserved", "error"]
BLOCK, SMALLEST = 2048, 4096  # elements: of a quantization block, and of the smallest tensor quantized (bitsandbytes)


class Setup(NamedTuple):
    """One line of the table; `name` is its label in the record."""

    name: str
    batch: int = 4
    accumulation: int = 1
    checkpointing: bool = False
    fp16: bool = False
    optimizer: str = "AdamW"


ALL = {"batch": 1, "accumulation": ACCUMULATION, "checkpointing": True, "fp16": True}
EVERYTHING = "batch 1 × accumulation 4, checkpointing, fp16"
SETUPS = (
    Setup("batch 4"),
    Setup("batch 1 × accumulation 4", 1, ACCUMULATION),
    Setup("batch 1 × accumulation 4, checkpointing", 1, ACCUMULATION, True),
    Setup("batch 4, fp16", fp16=True),
    Setup(EVERYTHING, **ALL),
    Setup("batch 4, Adafactor", optimizer="Adafactor"),
    Setup(f"{EVERYTHING}, Adafactor", **ALL, optimizer="Adafactor"),
    Setup("batch 4, 8-bit Adam", optimizer="8-bit Adam"),
    Setup(f"{EVERYTHING}, 8-bit Adam", **ALL, optimizer="8-bit Adam"),
)


# ---- what the older releases did


class KeepsInput(torch.autograd.Function):
    """Keeps its input for backward, as softmax did."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.saved_tensors  # noqa: B018 (frees them)
        return grad


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, None]:
    """BertSelfAttention of transformers 4.12 to 4.27, on PyTorch before 1.11."""
    scores = query @ key.transpose(-1, -2)  # (B, H, T, T)
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores + torch.zeros(query.shape[0], 1, 1, key.shape[2], device=query.device)
    weights = nn.functional.softmax(KeepsInput.apply(scores), dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).permute(0, 2, 1, 3).contiguous(), None  # (B, T, H, D)


def gelu(module: nn.Module, x: Tensor) -> Tensor:
    """nn.functional.gelu, which autocast computed in fp32 before PyTorch 1.10."""
    return nn.functional.gelu(x.float() if torch.is_autocast_enabled("cuda") else x)


class PerParameter(Optimizer):
    """An optimizer that updates its parameters one by one; `states` makes the states of one parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter].update(self.states(parameter))
                self.update(parameter, **self.state[parameter])


class AdamW(PerParameter):
    """transformers' AdamW (optimization.py): two states, and one temporary, the denominator."""

    def states(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}

    def update(self, parameter: Tensor, mean: Tensor, square: Tensor) -> None:
        mean.mul_(0.9).add_(parameter.grad, alpha=0.1)
        square.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
        denominator = square.sqrt().add_(1e-6)
        parameter.addcdiv_(mean, denominator, value=-5e-5)


class Adam8bit(PerParameter):
    """bitsandbytes' Adam8bit: both states in 1 byte, with an fp32 scale per block; one kernel, no temporaries."""

    def states(self, parameter: Tensor) -> dict[str, Tensor]:
        n, kept = parameter.numel(), {}
        for name in ("mean", "square"):
            kept[name] = torch.zeros_like(parameter, dtype=torch.uint8 if n >= SMALLEST else torch.float32)
            if n >= SMALLEST:
                kept[f"{name}_scales"] = torch.zeros(-(-n // BLOCK), device=parameter.device)
        return kept

    def update(self, parameter: Tensor, **states: Tensor) -> None: ...


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "AdamW": AdamW,
    "Adafactor": lambda parameters: Adafactor(parameters, lr=5e-5, scale_parameter=False, relative_step=False),
    "8-bit Adam": Adam8bit,
}


# ---- the run


def simulate_loading() -> int:
    """Return the bytes that the model's weights reserve."""
    with lab.simulator(GPU) as sim:
        BertForSequenceClassification(BertConfig(**BERT_LARGE)).cuda()
    return sim.peak_reserved


def simulate_training(setup: Setup) -> int:
    """Return the most bytes that a run of Trainer reserves, without the CUDA context."""
    with (
        mock.patch.object(modeling_bert, "eager_attention_forward", attention),
        mock.patch.object(GELUActivation, "forward", gelu),
        lab.simulator(GPU) as sim,
    ):
        model = BertForSequenceClassification(BertConfig(**BERT_LARGE, attn_implementation="eager")).cuda().train()
        if setup.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        optimizer = OPTIMIZERS[setup.optimizer](model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=setup.fp16)
        # The first step makes the states; the second has them throughout. A third micro-batch is like the second.
        for _ in range(2):
            for _ in range(min(setup.accumulation, 2)):
                scaler.scale(_loss(model, setup)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
    return sim.peak_reserved


def _loss(model: nn.Module, setup: Setup) -> Tensor:
    ids = torch.randint(100, 30000, (setup.batch, T), device="cuda")
    labels = torch.zeros(setup.batch, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16, enabled=setup.fp16):
        return model(input_ids=ids, labels=labels).loss / setup.accumulation


def measured(name: str) -> int:
    """Return the published bytes of a line, minus those of the context."""
    published = figure("bert-large-training-memory")
    context = published["CUDA context alone"] - SMALL_SEGMENT  # it was measured with a tensor of 1 × 1 on the card
    return int(published[name] - context)


def row(name: str, simulated: int) -> list[str]:
    true = measured(name)
    return [name, f"{true / MiB:,.0f} MiB", f"{simulated / MiB:,.0f} MiB", f"{simulated / true - 1:+.1%}"]


def to_markdown(simulated: dict[str, int], made: str) -> str:
    """Return the table of each line's simulated bytes, its notes, and the line that says what made it."""
    title = f"**Simulated against measured, BERT-large trained on a {GPU}, 512 tokens per sequence**"
    rows = [row(name, size) for name, size in simulated.items()]
    notes = [
        "- We simulate a PyTorch before 1.10. Its softmax also kept its input, and its autocast computed "
        "GELU in fp32, so the input of GELU needed twice the bytes. Today's PyTorch needs less where nothing is "
        "recomputed.",
        f"- The published context includes a segment of {SMALL_SEGMENT // MiB} MiB for a 1 × 1 tensor, which we "
        "subtract.",
        f"- Source: {figure('bert-large-training-memory').source}; NVML's figure, which is in whole MiB.",
    ]
    return "\n".join([title, "", *table(HEADER, rows), "", *notes, "", made])


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write bert.md to.")
def main(out: Path | None) -> None:
    """Compare the simulated card with the published table."""
    simulated = {LOADED: simulate_loading()} | {setup.name: simulate_training(setup) for setup in SETUPS}
    text = to_markdown(simulated, provenance("llmlab", "torch", "transformers"))
    print(text)
    if out:
        write(out / "bert.md", text)


if __name__ == "__main__":
    main()
