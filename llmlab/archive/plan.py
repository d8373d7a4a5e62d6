"""The measurements that the chapters ask for, as data.

The ones that a page needs most come first, so that a short budget buys the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..specs.run import Attention, Checkpointing, Inference, Precision, Run, Training


@dataclass(frozen=True)
class Item:
    """One measurement: for which chapter, of which model, and of which run."""

    chapter: str
    model: str
    run: Run

    def __str__(self) -> str:
        return f"{self.chapter}: {self.model} {self.run!r}"


def _memory_anatomy() -> list[Item]:
    runs: list[tuple[str, Run]] = []
    # The three precisions at one size; then how the peak grows with the batch and with the sequence.
    halves: tuple[Literal["fp16", "bf16"], ...] = ("fp16", "bf16")
    casts: tuple[Precision, ...] = ("autocast-fp16", "autocast-bf16")
    precisions: tuple[Precision, ...] = ("fp32", *casts)
    sizes = sorted(((b, t) for b in (1, 2, 4, 8) for t in (256, 512, 1024)), key=lambda size: size != (4, 1024))
    for micro_batch, seq_len in sizes:
        for precision in precisions:
            runs.append(("gpt2", Training(micro_batch=micro_batch, seq_len=seq_len, precision=precision)))
    # The same step: what attention keeps, and how much checkpointing saves.
    ways: tuple[tuple[Attention, Checkpointing | None], ...] = (("eager", None), ("sdpa", "full"), ("eager", "full"))
    for attention, checkpointing in ways:
        for precision in precisions:
            run = Training(
                micro_batch=4, seq_len=1024, precision=precision, attention=attention, checkpointing=checkpointing
            )
            runs.append(("gpt2", run))
    # Other sizes and the Llama family, up to what fills a card: 16 bytes per parameter before any activation.
    small = ("openai-community/gpt2-medium", "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-360M")
    large = ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "meta-llama/Llama-3.2-1B")
    for model in small + large:
        for precision in casts:
            for checkpointing in (None, "full"):
                run = Training(micro_batch=1, seq_len=1024, precision=precision, checkpointing=checkpointing)
                runs.append((model, run))
    # The same models with everything in half: 8 bytes per parameter, which fits on a T4.
    for model in large:
        for dtype in halves:
            run = Training(micro_batch=1, seq_len=1024, precision=dtype, checkpointing="full")
            runs.append((model, run))
    # The other side of the chapter's question: running a model, compared with training it.
    for model in ("gpt2", large[0]):
        for dtype in halves:
            runs.append((model, Inference(batch=1, prompt_len=512, new_tokens=64, weights=dtype, kv=dtype)))
    return [Item("memory-anatomy", model, run) for model, run in runs]


PLAN: tuple[Item, ...] = tuple(_memory_anatomy())
