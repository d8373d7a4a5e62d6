"""Lit-GPT's LoRA fine-tuning as a script for the simulator: its models, its adapters and its chunked loss.

What memory depends on, at commit 6178c7c of Lightning-AI/litgpt (lit_gpt/lora.py, model.py, rmsnorm.py, utils.py and
finetune/lora.py):

- all is in bf16, and the model's results are cast to fp32 (Fabric's HalfPrecision), the logits in chunks of 128 tokens;
- the adapters on queries and values are one grouped convolution, whose result is copied between zeros for the keys;
- since that commit Llama's norm computes in fp32 and keeps its input in fp32; the table names an earlier commit, whose
  Llama keeps one bf16 tensor of (tokens, width) less per norm and is 3 to 5 % lower;
- the first batch has the longest sample and determines the peak: later ones are shorter.

    B  batch    T  tokens    C  width    H  heads    D  head size    V  vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANK, ALPHA, DROPOUT = 8, 16, 0.05
CHUNK, ACCUMULATED = 128, 128


@dataclass(frozen=True)
class Shape:
    """A model's sizes; with `inner` 0 the blocks are like GPT-NeoX's, with 4 · width, else like Llama's.

    `turned` is the share of a head's channels that are rotated. With `parallel` attention and MLP read the same input,
    through one norm if `shared`.
    """

    layers: int
    width: int
    vocabulary: int
    longest: int
    inner: int = 0
    turned: float = 1.0
    parallel: bool = False
    shared: bool = False
    head_bias: bool = False
    heads: int = 32


SHAPES = {
    "phi-1.5": Shape(24, 2048, 51200, 1044, turned=0.5, parallel=True, shared=True, head_bias=True),
    "StableLM Alpha 3B": Shape(16, 4096, 50688, 1034, turned=0.25, parallel=True),
    "Llama 2 7B": Shape(32, 4096, 32000, 1304, inner=11008),
    "Llama 2 13B": Shape(40, 5120, 32000, 1304, inner=13824, heads=40),
}


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = torch.mean(wide * wide, dim=-1, keepdim=True)
        return (self.weight * (wide * torch.rsqrt(mean + 1e-5))).to(x.dtype)


class QueryKeyValue(nn.Module):
    """The projection to 3 · C, with adapters on the first and the last third."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, 3 * width, bias=bias), nn.Dropout(DROPOUT)
        self.lora_A = nn.Parameter(torch.zeros(2 * RANK, width))
        self.lora_B = nn.Parameter(torch.zeros(2 * width, RANK))
        self.places = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, x_BTC: Tensor) -> Tensor:
        straight = self.linear(x_BTC)
        low = F.linear(self.dropout(x_BTC), self.lora_A)
        high = F.conv1d(low.transpose(-2, -1), self.lora_B.unsqueeze(-1), groups=2).transpose(-2, -1)
        return straight + self._between_zeros(high) * (ALPHA / RANK)

    def _between_zeros(self, high_BTC: Tensor) -> Tensor:
        swapped = high_BTC.transpose(0, 1)
        padded = swapped.new_zeros(*swapped.shape[:-1], self.linear.out_features).view(-1, self.linear.out_features)
        places = torch.tensor(self.places, device=padded.device)
        padded = padded.index_copy(1, places, swapped.reshape(-1, len(self.places)))
        return padded.view(*swapped.shape[:-1], -1).transpose(0, 1)


def turned(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = x_BHTD.chunk(2, -1)
    return ((x_BHTD * cos_TD) + (torch.cat((-second, first), dim=-1) * sin_TD)).type_as(x_BHTD)


class MLP(nn.Module):
    """GPT-NeoX's MLP, or Llama's if the shape has an `inner` width."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner, bias = shape.inner or 4 * shape.width, not shape.inner
        self.up, self.down = nn.Linear(shape.width, inner, bias=bias), nn.Linear(inner, shape.width, bias=bias)
        self.gate = nn.Linear(shape.width, inner, bias=False) if shape.inner else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.gate(x), self.up(x)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = Norm if shape.inner else nn.LayerNorm
        self.shape, self.norm_1, self.mlp = shape, norm(shape.width), MLP(shape)
        self.norm_2 = None if shape.shared else norm(shape.width)
        self.attn = QueryKeyValue(shape.width, not shape.inner)
        self.proj = nn.Linear(shape.width, shape.width, bias=not shape.inner)

    def attend(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        heads, rotated = self.shape.heads, cos_TD.shape[-1]
        thirds = self.attn(x_BTC).view(B, T, heads, 3, C // heads).permute(0, 2, 3, 1, 4).split((1, 1, 1), dim=2)
        q, k, v = (each.reshape(B, -1, T, C // heads) for each in thirds)
        q_turned, k_turned = (turned(each[..., :rotated], cos_TD, sin_TD) for each in (q, k))
        q = torch.cat((q_turned, q[..., rotated:]), dim=-1)
        k = torch.cat((k_turned, k[..., rotated:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.attend(normed, cos, sin)
        if self.shape.parallel:
            return self.mlp(normed if self.norm_2 is None else self.norm_2(x)) + attended + x
        x = attended + x
        return self.mlp(self.norm_2(x)) + x


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=shape.head_bias)
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width) if shape.inner else nn.LayerNorm(shape.width)
        angles = torch.zeros(shape.longest, int(shape.turned * shape.width // shape.heads))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids_BT: Tensor) -> list[Tensor]:
        x_BTC = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, self.cos, self.sin)
        return [self.head(chunk) for chunk in self.norm(x_BTC).split(CHUNK, dim=1)]


def chunked_loss(logits: list[Tensor], targets_BT: Tensor) -> Tensor:
    losses = [
        F.cross_entropy(chunk.reshape(-1, chunk.shape[-1]), target.reshape(-1), ignore_index=-1, reduction="none")
        for chunk, target in zip(logits, targets_BT.split(CHUNK, dim=1), strict=True)
    ]
    return torch.cat(losses).mean()


def fine_tune(name: str, batch: int) -> None:
    """Run forward and backward of the first batch, on "cuda"."""
    shape = SHAPES[name]
    with torch.device("meta"):
        model = Model(shape).to(torch.bfloat16)
    model.to_empty(device="cuda")
    for parameter, value in model.named_parameters():
        value.requires_grad_("lora" in parameter)
    ids_BT, labels_BT = (torch.zeros(batch, shape.longest, dtype=torch.int64).cuda() for _ in range(2))
    logits = [chunk.float() for chunk in model(ids_BT)]
    logits[-1] = logits[-1][..., :-1, :]
    (chunked_loss(logits, labels_BT[..., 1:]) / (ACCUMULATED // batch)).backward()
