"""The measurements that the chapters ask for, as data.

The ones that a page needs most come first, so that a short budget buys the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from ..specs.run import Attention, Checkpointing, Inference, LoRA, Precision, Run, Training


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
    # Other sizes and the Llama family, up to what fills a GPU: 16 bytes per parameter before any activation.
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


def _flops_and_time() -> list[Item]:
    """Steps of sizes that people train on one large GPU: methods, lengths, kernels, compiled and not."""
    llama, llama3, llama8 = (f"meta-llama/Llama-3.{size}" for size in ("2-1B", "2-3B", "1-8B"))
    qwen, qwen7, qwen14, smol = "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B", "HuggingFaceTB/SmolLM2-1.7B"
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapters, everywhere = LoRA(), LoRA(targets=linears)
    half, full = partial(Training, precision="bf16"), partial(Training, precision="bf16", checkpointing="full")
    cast = partial(Training, precision="autocast-bf16")
    runs: list[tuple[str, Run]] = [
        (llama, cast(micro_batch=4, seq_len=2048)),
        (llama8, full(micro_batch=2, seq_len=2048, lora=adapters)),
        (llama3, half(micro_batch=2, seq_len=4096)),
        (llama, half(micro_batch=4, seq_len=2048, compile=True)),
        (llama, half(micro_batch=4, seq_len=2048)),
        (llama, full(micro_batch=8, seq_len=2048)),
        (llama, half(micro_batch=1, seq_len=8192)),
        (llama, full(micro_batch=1, seq_len=16384)),
        (llama, half(micro_batch=2, seq_len=2048, accumulation=4)),
        (llama, half(micro_batch=2, seq_len=2048, attention="eager")),
        (llama, half(micro_batch=8, seq_len=2048, kernels="liger")),
        (llama, half(micro_batch=16, seq_len=512)),
        (llama3, full(micro_batch=4, seq_len=4096)),
        (llama3, full(micro_batch=2, seq_len=4096, optimizer="adafactor")),
        (llama8, half(micro_batch=2, seq_len=2048, lora=everywhere)),
        (llama8, full(micro_batch=1, seq_len=8192, lora=everywhere)),
        (llama8, full(micro_batch=2, seq_len=2048, lora=everywhere, quantization="nf4")),
        (llama8, full(micro_batch=1, seq_len=4096, optimizer="sgd")),
        (llama8, full(micro_batch=1, seq_len=2048, optimizer="adamw-8bit")),
        (qwen, half(micro_batch=4, seq_len=2048)),
        (qwen, half(micro_batch=4, seq_len=2048, compile=True)),
        (qwen, cast(micro_batch=2, seq_len=1024)),
        (qwen7, full(micro_batch=4, seq_len=1024, lora=everywhere)),
        (qwen7, half(micro_batch=1, seq_len=4096, lora=adapters)),
        (qwen7, half(micro_batch=1, seq_len=2048, lora=everywhere, quantization="nf4")),
        (qwen14, full(micro_batch=1, seq_len=4096, lora=everywhere)),
        (qwen14, full(micro_batch=4, seq_len=2048, lora=adapters)),
        ("Qwen/Qwen2.5-0.5B", cast(micro_batch=8, seq_len=1024)),
        ("Qwen/Qwen2.5-0.5B", half(micro_batch=1, seq_len=512)),
        ("Qwen/Qwen3-0.6B", half(micro_batch=2, seq_len=4096)),
        ("Qwen/Qwen3-1.7B", full(micro_batch=2, seq_len=4096)),
        ("Qwen/Qwen3-4B", full(micro_batch=1, seq_len=4096)),
        ("mistralai/Mistral-7B-v0.3", full(micro_batch=1, seq_len=8192, lora=adapters)),
        ("google/gemma-2-2b", full(micro_batch=1, seq_len=2048, attention="eager", lora=adapters)),
        ("microsoft/Phi-3-mini-4k-instruct", full(micro_batch=2, seq_len=4096)),
        ("gpt2-xl", cast(micro_batch=4, seq_len=1024)),
        ("gpt2-xl", half(micro_batch=8, seq_len=1024)),
        ("gpt2", cast(micro_batch=32, seq_len=1024)),
        ("gpt2", cast(micro_batch=16, seq_len=1024, compile=True)),
        (smol, half(micro_batch=4, seq_len=2048)),
        ("HuggingFaceTB/SmolLM2-135M", cast(micro_batch=16, seq_len=1024)),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", Training(micro_batch=2, seq_len=1024)),
        (llama8, half(micro_batch=2, seq_len=2048, lora=adapters, compile=True)),
    ]
    # The other half of a GPU's work: a prompt, and one token after another.
    for model in (llama, llama8):
        for batch in (1, 16):
            runs.append((model, Inference(batch=batch, prompt_len=1024, new_tokens=64, weights="bf16", kv="bf16")))
    return [Item("flops-and-time", model, run) for model, run in runs]


PLAN: tuple[Item, ...] = (*_memory_anatomy(), *_flops_and_time())
