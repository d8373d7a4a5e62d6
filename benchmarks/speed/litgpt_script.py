"""LitGPT's eager FSDP2 run whose memory was published, as a script for the simulator: 7B, all in bf16.

The model is LitGPT 0.3.1's Llama in all that memory depends on (litgpt/model.py): one linear layer computes queries,
keys and values, and because attention keeps the values, a view of its output, the whole output stays in memory; rotated
queries and keys are copied once more; norms are computed in fp32 and rounded before they are multiplied by the weight.
The loop is that of Lightning Thunder's benchmark (thunder/benchmarks/benchmark_litgpt.py): zero2, so parameters stay in
memory from forward to backward, and a fused AdamW.

    B  batch    T  tokens    C  width    H  heads    D  head size    V  vocabulary
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llmlab as lab
from llmlab.archive import figure

RANKS, B, T, C, H, D, V = 8, 1, 4096, 4096, 32, 128, 32000
LAYERS, INNER = 32, 11008


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return scaled.to(x.dtype) * self.weight


def turned(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the pairs of channels that lie half a head apart; as LitGPT does, copy all channels, rotated or not."""
    first, second = x_BHTD.chunk(2, -1)
    both = x_BHTD * cos_TD + torch.cat((-second, first), -1) * sin_TD
    return torch.cat((both, x_BHTD[..., D:]), -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)  # noqa: E731
        self.norm_1, self.norm_2 = Norm(), Norm()
        self.qkv, self.proj = linear(C, 3 * C), linear(C, C)
        self.gate, self.up, self.down = linear(C, INNER), linear(C, INNER), linear(INNER, C)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x_BTC)).view(B, T, H, 3, D).permute(3, 0, 2, 1, 4)  # (B, H, T, D) each
        q, k = turned(q, cos_TD, sin_TD), turned(k, cos_TD, sin_TD)
        y_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = self.proj(y_BHTD.transpose(1, 2).reshape(B, T, C)) + x_BTC
        inner = self.norm_2(x_BTC)
        return self.down(F.silu(self.gate(inner)) * self.up(inner)) + x_BTC


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, C)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = nn.Linear(C, V, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(T, D))

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, self.cos, self.sin)
        return self.head(self.norm(x_BTC))


def train(steps: int = 2) -> None:
    """Take `steps` steps on "cuda"."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = Llama().to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(steps):
        ids_BT = torch.zeros(B, T, dtype=torch.int64, device="cuda")
        logits = model(ids_BT).view(-1, V)
        F.cross_entropy(logits, torch.zeros_like(ids_BT).view(-1), ignore_index=-1).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def published() -> dict[str, int]:
    """Return the published peak in bytes."""
    return {"active": figure("litgpt-fsdp2-memory").values["7B, 8 GPUs: active"]}


def simulated() -> dict[str, int]:
    """Return the peak of rank 0, in bytes."""
    with lab.simulator("H100-80GB", world_size=RANKS) as sim:
        train()
        return {"active": sim.peak_allocated}
