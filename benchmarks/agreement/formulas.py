"""lab.simulator against memory that was published as a formula: of a layer's activations, of a token in the KV cache.

    python -m benchmarks.agreement.formulas                           # prints
    python -m benchmarks.agreement.formulas --out benchmarks/results  # and writes formulas.md, which the book includes

These are the published formulas that one simulated device can be compared with; nobody measured the values. The formula
for a layer (Korthikanti et al., arXiv 2205.05198, eq. 1 and 2) leaves out each norm's mean and 1/σ, in fp32: 16·s·b
bytes for two norms. The simulated layer is GPT-2's, which is also the paper's: 16-bit, eager attention, exact GELU,
three dropouts.

    s  tokens per sequence    b  batch    h  width    a  heads
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import llmlab as lab
from benchmarks.provenance import provenance, table, write
from llmlab.archive import figure

GPU = "A100-80GB"
s, b = 2048, 1
LAYERS = {"22B": (6144, 64), "175B": (12288, 96), "530B": (20480, 128), "1T": (25600, 160)}  # h, a: its table 3
CACHES = {"8B": ("meta-llama/Llama-3.1-8B", GPU), "70B": ("meta-llama/Llama-3.1-70B", "B200")}  # no card holds 405B
PROMPT = 1024
HEADER = ["kept tensors", "formula", "simulated", "error"]


def simulate_layer(h: int, a: int, recomputed: bool) -> int:
    """Return the bytes that one layer keeps between forward and backward, with its input and without its output."""
    config = GPT2Config(n_embd=h, n_head=a, n_positions=s, activation_function="gelu", attn_implementation="eager")
    with lab.simulator(GPU):
        layer = GPT2Block(config, layer_idx=0).cuda().half().train()
        mask = torch.zeros(1, 1, s, s, device="cuda", dtype=torch.float16)
        run = lambda x: layer(x, attention_mask=mask)  # noqa: E731
        with torch.no_grad():
            run(torch.randn(b, s, h, device="cuda", dtype=torch.float16))  # cuBLAS takes its workspace
        before = torch.cuda.memory_allocated()
        x = torch.randn(b, s, h, device="cuda", dtype=torch.float16, requires_grad=True)
        y = checkpoint(run, x, use_reentrant=False) if recomputed else run(x)
        y = y[0] if isinstance(y, tuple) else y
        return torch.cuda.memory_allocated() - before - y.numel() * y.element_size()


def layer_formula(h: int, a: int, recomputed: bool) -> int:
    """Return the published bytes of one layer."""
    if recomputed:
        return int(figure("activation-bytes-a-layer-full-recompute")["sbh"]) * s * b * h
    published = figure("activation-bytes-a-layer")
    return int(published["sbh"]) * s * b * h + int(published["a·s²·b"]) * a * s * s * b


def simulate_token(model: str, gpu: str) -> float:
    """Return the bytes of KV cache per token of the prompt, in bf16."""
    return lab.simulate(model, lab.Inference(prompt_len=PROMPT, new_tokens=1), gpu).parts["kv_cache"] / PROMPT


def rows() -> list[tuple[str, float, float]]:
    """Return kept tensors, the formula's bytes and the simulated bytes."""
    found: list[tuple[str, float, float]] = []
    for recomputed in (False, True):
        for name, (h, a) in LAYERS.items():
            what = f"a layer of the {name} GPT" + (", recomputed" if recomputed else "")
            found.append((what, layer_formula(h, a, recomputed), simulate_layer(h, a, recomputed)))
    for name, (model, gpu) in CACHES.items():
        published = figure("kv-cache-bytes-a-token")[name]
        found.append((f"a token of Llama 3.1 {name} in the KV cache", published, simulate_token(model, gpu)))
    return found


def to_markdown(found: list[tuple[str, float, float]], made: str) -> str:
    """Return the table, what differs and why, and the line that says what made it."""
    body = [[what, f"{true:,.0f} B", f"{size:,.0f} B", f"{size - true:+,.0f} B"] for what, true, size in found]
    sources = dict.fromkeys(
        figure(key).source
        for key in ("activation-bytes-a-layer", "activation-bytes-a-layer-full-recompute", "kv-cache-bytes-a-token")
    )
    notes = [
        f"- Layers in fp16, {s} tokens, batch {b}. The formula leaves out the norms' mean and 1/σ in fp32, "
        f"16·s·b = {16 * s * b:,} bytes of a layer's two norms.",
        *(f"- Source: {source}." for source in sources),
    ]
    return "\n".join(["**Simulated against published formulas**", "", *table(HEADER, body), "", *notes, "", made])


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write formulas.md to.")
def main(out: Path | None) -> None:
    """Compare the simulated card with the published formulas."""
    text = to_markdown(rows(), provenance("llmlab", "torch", "transformers"))
    print(text)
    if out:
        write(out / "formulas.md", text)


if __name__ == "__main__":
    main()
