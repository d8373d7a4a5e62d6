"""Two GPTs that people train to learn from: minGPT's and the one of "Build a Large Language Model From Scratch".

They reproduce all that memory depends on in karpathy/minGPT (mingpt/model.py, trainer.py, demo.ipynb at commit 37baab7)
and in rasbt/LLMs-from-scratch (ch05/10_llm-training-speed, 00_orig.py, and 01_opt_single_gpu.py for the changes of its
steps).

    B  batch    T  tokens    C  width    H  heads    D  head size
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DROPOUT = 0.1


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int


NANO, SMALL, XL = Size(3, 3, 48), Size(12, 12, 768), Size(48, 25, 1600)


def split_heads(x_BTC: Tensor, heads: int) -> Tensor:
    B, T, C = x_BTC.shape
    return x_BTC.view(B, T, heads, C // heads).transpose(1, 2)


class FormulaGELU(nn.Module):
    """tanh's approximation, one operator per symbol; minGPT's root is a number, the book's a tensor on the host."""

    def __init__(self, of_tensor: bool) -> None:
        super().__init__()
        self.of_tensor = of_tensor

    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(torch.tensor(2.0 / torch.pi)) if self.of_tensor else math.sqrt(2.0 / math.pi)
        return 0.5 * x * (1.0 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3.0))))


class FormulaNorm(nn.Module):
    """The book's layer norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


# ---- minGPT


class MinAttention(nn.Module):
    def __init__(self, size: Size, tokens: int) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.of_weights, self.of_output = nn.Dropout(DROPOUT), nn.Dropout(DROPOUT)
        self.register_buffer("mask", torch.ones(tokens, tokens).tril()[None, None])

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = self.qkv(x_BTC).split(C, dim=2)
        k, q, v = (split_heads(each, self.heads) for each in (k, q, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        weights = self.of_weights(F.softmax(scores, dim=-1))
        y = (weights @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.of_output(self.proj(y))


class MinBlock(nn.Module):
    def __init__(self, size: Size, tokens: int) -> None:
        super().__init__()
        C = size.width
        self.norm_1, self.attention, self.norm_2 = nn.LayerNorm(C), MinAttention(size, tokens), nn.LayerNorm(C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), FormulaGELU(False), nn.Linear(4 * C, C), nn.Dropout(DROPOUT))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


def train_mingpt(
    size: Size, early: bool, batch: int = 64, tokens: int = 11, vocabulary: int = 3, steps: int = 3
) -> None:
    """demo.ipynb: sort six digits; `early`: gradients are freed right after the step, else after the next forward.

    The optimizer and the clipping work on one parameter at a time, as in PyTorch before 2.0.
    """
    model = GPT([MinBlock(size, tokens) for _ in range(size.layers)], nn.LayerNorm, size, tokens, vocabulary).cuda()
    matrices = model.matrices()
    others = [each for each in model.parameters() if all(each is not matrix for matrix in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.95), foreach=False)
    for _ in range(steps):
        ids, targets = (torch.zeros(batch, tokens, dtype=torch.int64).cuda() for _ in range(2))
        logits = model(ids)
        loss = F.cross_entropy(logits.view(-1, vocabulary), targets.view(-1), ignore_index=-1)
        if not early:
            model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        if early:
            model.zero_grad(set_to_none=True)


# ---- the book's GPT


@dataclass(frozen=True)
class Changes:
    """What is changed in the book's model: the mask is made where it is used, PyTorch's classes and attention, bf16."""

    mask: bool = False
    fused_optimizer: bool = False
    classes: bool = False
    attention: bool = False
    dtype: torch.dtype = field(default=torch.float32)


class BookAttention(nn.Module):
    def __init__(self, size: Size, tokens: int, changes: Changes) -> None:
        super().__init__()
        self.heads, self.changes, C = size.heads, changes, size.width
        self.q, self.k, self.v = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.proj, self.dropout = nn.Linear(C, C), nn.Dropout(DROPOUT)
        if not changes.mask:
            self.register_buffer("upper", torch.ones(tokens, tokens).triu(diagonal=1))

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        k, q, v = (split_heads(project(x_BTC), self.heads) for project in (self.k, self.q, self.v))
        scores = q @ k.transpose(2, 3)
        upper = torch.ones(T, T, device=x_BTC.device).triu(diagonal=1) if self.changes.mask else self.upper
        hidden = upper.bool()[:T, :T]
        scores.masked_fill_(hidden, -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.proj((weights @ v).transpose(1, 2).reshape(B, T, C))


class FusedAttention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width, bias=False), nn.Linear(size.width, size.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = self.qkv(x_BTC).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        dropout = DROPOUT if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


class BookBlock(nn.Module):
    def __init__(self, size: Size, tokens: int, changes: Changes) -> None:
        super().__init__()
        C, norm = size.width, nn.LayerNorm if changes.classes else FormulaNorm
        gelu = nn.GELU(approximate="tanh") if changes.classes else FormulaGELU(True)
        self.attention = FusedAttention(size) if changes.attention else BookAttention(size, tokens, changes)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), gelu, nn.Linear(4 * C, C))
        self.norm_1, self.norm_2, self.dropout = norm(C), norm(C), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.dropout(self.attention(self.norm_1(x))) + shortcut
        shortcut = x
        return self.dropout(self.mlp(self.norm_2(x))) + shortcut


def train_book(changes: Changes, batch: int = 8, tokens: int = 1024, vocabulary: int = 50257, steps: int = 2) -> None:
    """Train the 124M model, and evaluate it on two batches after the first step, as 00_orig.py does."""
    blocks = [BookBlock(SMALL, tokens, changes) for _ in range(SMALL.layers)]
    norm = nn.LayerNorm if changes.classes else FormulaNorm
    model = GPT(blocks, norm, SMALL, tokens, vocabulary).cuda().to(changes.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=changes.fused_optimizer or None)

    def loss() -> Tensor:
        ids, targets = (torch.zeros(batch, tokens, dtype=torch.int64).cuda() for _ in range(2))
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    for step in range(steps):
        optimizer.zero_grad()
        found = loss()
        found.backward()
        optimizer.step()
        if step == 0:
            model.eval()
            with torch.no_grad():
                loss(), loss()
            model.train()


class GPT(nn.Module):
    """Blocks between embeddings and a head of its own."""

    def __init__(
        self, blocks: list[nn.Module], norm: type[nn.Module], size: Size, tokens: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, size.width), nn.Embedding(tokens, size.width)
        self.dropout, self.blocks, self.norm = nn.Dropout(DROPOUT), nn.ModuleList(blocks), norm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        T = ids_BT.shape[1]
        # both stay in memory until the end of forward
        words_BTC, places_TC = self.words(ids_BT), self.places(torch.arange(T, device=ids_BT.device))
        x_BTC = self.dropout(words_BTC + places_TC)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.norm(x_BTC))

    def matrices(self) -> list[nn.Parameter]:
        """Return the weights of the linear layers."""
        return [module.weight for module in self.modules() if isinstance(module, nn.Linear)]
