"""TorchTitan's eager FSDP2 runs whose memory was published, as scripts for the simulator: its model, its recomputation.

The model is TorchTitan's Llama in all that memory depends on (at commits 83c879f, torchtrain/models/llama/model.py, and
9dec370, torchtitan/models/llama/model.py): norms are computed and queries and keys are rotated in fp32, and the cross
entropy is of fp32 logits. "op" recomputes all but attention and every second matrix product (parallelize_llama.py);
parameters of the last block stay in memory from forward to backward. Published are PyTorch's peaks of active and of
reserved bytes (metrics.py).

What changed from run to run, with the source of each:
- until June 12, 2024, the model cast the logits to fp32 and the loop kept them through backward; since October the
  loss casts them, and the loop deletes them (TorchTitan's pull/391 and commit e10cb94);
- until June 27, 2024, FSDP2 allocated the tensors to reduce on the stream of the reduction, where other operators
  cannot reuse their memory; since then on the stream of backward (github.com/pytorch/pytorch/pull/129721);
- run_llama_train.sh has asked for expandable segments since October 2024. It starts the ranks of one machine, so the
  table of December 2024, up to 128 GPUs, was not made with it.

    B  batch    T  tokens    C  width    H  heads    K  key-value heads    D  head size    V  vocabulary
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import llmlab as lab
from llmlab.archive import figure
from llmlab.base.units import GiB
from llmlab.hardware.gpu import GPU

CARD = replace(lab.gpu("H100-80GB"), memory=round(95.0396 * GiB))  # these runs' H100 with 96 GB, as they report it
aten = torch.ops.aten
KINDS = ("active", "reserved", "reserved in the first step")
SAVED = (aten.mm.default, aten._scaled_dot_product_flash_attention.default)


@dataclass(frozen=True)
class Run:
    """A published run: its label in the records, sizes, ranks and recomputation ("full" or "op").

    `early`: before the middle of June 2024. `resharded`: the blocks that free their parameters after forward, "all",
    "none", or "default", all but the last.
    """

    name: str
    ranks: int
    batch: int
    tokens: int
    recompute: str
    kv_heads: int = 32
    inner: int = 11008
    vocabulary: int = 32000
    early: bool = False
    expandable: bool = False
    resharded: str = "default"
    loss_chunks: int = 1  # parts of the sequence whose losses are computed one by one
    card: GPU = CARD
    layers: int = 32
    width: int = 4096
    heads: int = 32


LLAMA_3 = {"kv_heads": 8, "inner": 14336, "vocabulary": 128256}
ONE = {**LLAMA_3, "expandable": True}  # one sequence per GPU, as configured, and run_llama_train.sh
RUNS = (
    Run("7B, 8 GPUs, full recomputation", 8, 8, 2048, "full", early=True),
    Run("7B, 8 GPUs, selective", 8, 8, 2048, "op", early=True),
    Run("8B, 8 A100, 1 sequence", 8, 1, 8192, "op", **LLAMA_3, early=True, card=lab.gpu("A100-80GB")),
    Run("8B, 8 GPUs, selective", 8, 2, 8192, "op", **LLAMA_3),
    Run("8B, 128 GPUs, selective", 128, 2, 8192, "op", **LLAMA_3),
    Run("8B, 1 sequence", 8, 1, 8192, "op", **ONE),
    Run("8B, 1 sequence, always resharded", 8, 1, 8192, "op", **ONE, resharded="all"),
    Run("8B, 1 sequence, never resharded", 8, 1, 8192, "op", **ONE, resharded="none"),
    Run("8B, 1 sequence, loss in 8 chunks", 8, 1, 8192, "op", **ONE, loss_chunks=8),
)


def published(run: Run) -> dict[str, int]:
    """Return the published peaks in bytes, by kind."""
    found = figure("torchtitan-fsdp2-memory").values
    return {what: value for what in KINDS if (value := found.get(f"{run.name}: {what}")) is not None}


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
        self.wide = run.early
        self.register_buffer("turns", torch.empty(run.tokens, run.width // run.heads // 2, dtype=torch.complex64))

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, self.turns)
        logits_BTV = self.head(self.norm(x_BTC))
        return logits_BTV.float() if self.wide else logits_BTV


def recomputed(block: nn.Module, kind: str) -> None:
    """Make backward recompute the block's forward."""

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


def loss_of(logits_BTV: Tensor, labels_BT: Tensor, chunks: int) -> Tensor:
    """Return the cross entropy in fp32, as the mean over `chunks` parts of the sequence."""
    pairs = zip(logits_BTV.chunk(chunks, 1), labels_BT.chunk(chunks, 1), strict=True)
    return sum(F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1)) for logits, labels in pairs) / chunks


def train(run: Run, steps: int = 2) -> Iterator[None]:
    """Take `steps` steps on "cuda", and yield after each."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = Llama(run)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    resharded = {"all": run.layers, "none": 0, "default": run.layers - 1}[run.resharded]
    for number, block in enumerate(model.blocks):
        recomputed(block, run.recompute)
        fully_shard(block, mp_policy=policy, reshard_after_forward=number < resharded)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    for _ in range(steps):
        ids_BT = torch.zeros(run.batch, run.tokens + 1, dtype=torch.int64, device="cuda")
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            logits = model(ids_BT[:, :-1])
            loss = loss_of(logits, ids_BT[:, 1:], run.loss_chunks)
            if not run.early:
                del logits
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        yield


@contextmanager
def reduced_from_its_own_stream() -> Iterator[None]:
    """Make FSDP2 allocate on the stream of the reduction, and free at once, as until June 27, 2024."""
    group = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    real = group.foreach_reduce
    names = list(signature(real).parameters)

    def foreach_reduce(*args: Any) -> tuple:
        with torch.cuda.stream(args[names.index("reduce_scatter_stream")]):
            _, *rest = real(*args)
        return None, *rest

    with mock.patch.object(group, "foreach_reduce", foreach_reduce):
        yield


def simulated(run: Run) -> dict[str, int]:
    """Return the peaks of rank 0 in bytes, by kind."""
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if run.expandable else {}
    fsdp = reduced_from_its_own_stream() if run.early else nullcontext()
    with mock.patch.dict(os.environ, settings), lab.simulator(run.card, world_size=run.ranks) as sim, fsdp:
        first, *_ = [sim.peak_reserved for _ in train(run)]
        return dict(zip(KINDS, (sim.peak_allocated, sim.peak_reserved, first), strict=True))
