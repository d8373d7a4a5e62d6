"""TorchTitan's eager FSDP2 runs whose memory was published, as scripts for the simulator: its model, its recomputation.

The model is TorchTitan's Llama as to what memory depends on (at commits 83c879f, torchtrain/models/llama/model.py, and
9dec370, torchtitan/models/llama/model.py): norms and turned queries and keys in fp32, the cross entropy of fp32 logits.
Two things changed between the runs: in March 2024 the model made the logits fp32 itself and the loop kept them through
backward; in December the loss did, and the loop let them go (train.py).

"op" recomputes all but attention and every other matrix product (parallelize_llama.py); parameters of the last block
stay from forward to backward. What was read is PyTorch's peak of active and of reserved bytes (metrics.py).

    B  batch    T  tokens    C  width    H  heads    K  key-value heads    D  head size    V  vocabulary
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import llmlab as lab
from llmlab.records import figure
from llmlab.units import GiB

CARD = replace(lab.gpu("H100-80GB"), memory=round(95.0396 * GiB))  # the H100 with 96 GB of these runs, as they give it
aten = torch.ops.aten
SAVED = (aten.mm.default, aten._scaled_dot_product_flash_attention.default)


@dataclass(frozen=True)
class Run:
    """A published run: its label in the records, sizes, ranks and recomputation ("full" or "op")."""

    name: str
    ranks: int
    batch: int
    tokens: int
    recompute: str
    kv_heads: int = 32
    inner: int = 11008
    vocabulary: int = 32000
    keeps_logits: bool = True  # as in March 2024
    expandable: bool = False
    layers: int = 32
    width: int = 4096
    heads: int = 32


LLAMA_3 = {"kv_heads": 8, "inner": 14336, "vocabulary": 128256, "keeps_logits": False, "expandable": True}
RUNS = (
    Run("7B, 8 GPUs, full recomputation", 8, 8, 2048, "full"),
    Run("7B, 8 GPUs, selective", 8, 8, 2048, "op"),
    Run("8B, 8 GPUs, selective", 8, 2, 8192, "op", **LLAMA_3),
    Run("8B, 128 GPUs, selective", 128, 2, 8192, "op", **LLAMA_3),
)


def published(run: Run) -> tuple[int | None, int]:
    """Return the peaks that were read, active and reserved, in bytes; None where only the second was published."""
    found = figure("torchtitan-fsdp2-memory").values
    return found.get(f"{run.name}: active"), found[f"{run.name}: reserved"]


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def turned(x_BTHD: Tensor, turns_TD: Tensor) -> Tensor:
    """Multiply pairs of channels as complex numbers, in fp32."""
    pairs = torch.view_as_complex(x_BTHD.float().reshape(*x_BTHD.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns_TD[:, None]).flatten(3).type_as(x_BTHD)


class Block(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.size = run.width // run.heads
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)  # noqa: E731
        self.attention_norm, self.mlp_norm = Norm(run.width), Norm(run.width)
        self.q, self.o = linear(run.width, run.width), linear(run.width, run.width)
        self.k, self.v = (linear(run.width, run.kv_heads * self.size) for _ in range(2))
        self.gate, self.up = linear(run.width, run.inner), linear(run.width, run.inner)
        self.down = linear(run.inner, run.width)

    def attend(self, x_BTC: Tensor, turns_TD: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = (project(x_BTC).view(B, T, -1, self.size) for project in (self.q, self.k, self.v))
        q, k = turned(q, turns_TD), turned(k, turns_TD)
        repeats = q.shape[2] // k.shape[2]
        if repeats > 1:
            k, v = (t[:, :, :, None].expand(-1, -1, -1, repeats, -1).flatten(2, 3) for t in (k, v))
        y_BHTD = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.o(y_BHTD.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x_BTC: Tensor, turns_TD: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attend(self.attention_norm(x_BTC), turns_TD)
        inner = self.mlp_norm(x_BTC)
        return x_BTC + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embedding = nn.Embedding(run.vocabulary, run.width)
        self.blocks = nn.ModuleList(Block(run) for _ in range(run.layers))
        self.norm = Norm(run.width)
        self.head = nn.Linear(run.width, run.vocabulary, bias=False)
        self.wide = run.keeps_logits
        self.register_buffer("turns", torch.empty(run.tokens, run.width // run.heads // 2, dtype=torch.complex64))

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, self.turns)
        logits_BTV = self.head(self.norm(x_BTC))
        return logits_BTV.float() if self.wide else logits_BTV


def recomputed(block: nn.Module, kind: str) -> None:
    """Let the block's forward be recomputed in backward."""

    def contexts() -> tuple[Any, Any]:
        products: dict[bool, int] = defaultdict(int)

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if func == aten.mm.default:
                products[context.is_recompute] += 1
            saves = func in SAVED and not (func == aten.mm.default and products[context.is_recompute] % 2 == 0)
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    forward = block.forward
    given: dict[str, Callable] = {"context_fn": contexts} if kind == "op" else {}
    block.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **given)


def train(run: Run, steps: int = 2) -> None:
    """Take `steps` steps on "cuda"."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = Llama(run)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, block in enumerate(model.blocks):
        recomputed(block, run.recompute)
        fully_shard(block, mp_policy=policy, reshard_after_forward=number < run.layers - 1)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    for _ in range(steps):
        ids_BT = torch.zeros(run.batch, run.tokens + 1, dtype=torch.int64, device="cuda")
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            logits = model(ids_BT[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids_BT[:, 1:].flatten(0, 1))
            if not run.keeps_logits:
                del logits
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


def simulated(run: Run) -> tuple[int, int]:
    """Return the peaks of rank 0, allocated and reserved, in bytes."""
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if run.expandable else {}
    with mock.patch.dict(os.environ, settings), lab.simulator(CARD, world_size=run.ranks) as sim:
        train(run)
        return sim.peak_allocated, sim.peak_reserved
