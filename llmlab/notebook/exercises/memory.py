"""Facts about the functions of yours/memory.py."""

from __future__ import annotations

import torch
from torch import nn

from ...course.job import MODEL
from ...formulas.report import estimated
from ...specs.run import Training


def _toy(tied=False, stepped=False) -> nn.Module:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    if tied:
        second.weight = nn.Parameter(first.weight.detach().T)  # another tensor, the same memory
    layers = nn.Sequential(first, second)
    if stepped:
        layers(torch.ones(1, 4)).sum().backward()
    return layers


states = {
    "fp32 weights, no gradients yet": lambda f: f(_toy()) == {"weights": 2 * 64, "gradients": 0},
    "gradients after backward": lambda f: f(_toy(stepped=True)) == {"weights": 2 * 64, "gradients": 2 * 64},
    "shared memory counts once": lambda f: f(_toy(tied=True))["weights"] == 64,
    "bf16 needs half": lambda f: f(_toy().bfloat16())["weights"] == 64,
}


def _agrees(f, B: int, S: int) -> bool:
    peak = estimated(MODEL, Training(micro_batch=B, seq_len=S, attention="eager"), None).peak_allocated
    return peak is not None and abs(f(B, S) / peak - 1) < 0.005


peak_bytes = {
    "the job, 4 × 1,024": lambda f: _agrees(f, 4, 1024),
    "many short sequences, 16 × 256": lambda f: _agrees(f, 16, 256),
    "one sequence of 1,024": lambda f: _agrees(f, 1, 1024),
    "16 tokens, where the update is the peak": lambda f: _agrees(f, 1, 16),
}

# Blocks of (size in MiB, free): the two segments whose fragmentation chapter 3 draws.
_HOLES = [[(5, True), (5, False)] * 2] * 2
_TWO = [[(4, False), (16, True)], [(20, True)]]

largest_request = {
    "holes": lambda f: f(_HOLES) == 5,
    "two segments": lambda f: f(_TWO) == 20,
    "adjacent blocks are one": lambda f: f([[(3, True), (4, True), (1, False), (6, True)]]) == 7,
    "but not across segments": lambda f: f([[(8, True)], [(8, True)]]) == 8,
    "nothing is free": lambda f: f([[(2, False)]]) == 0,
}

allocated_at_end = {
    "one stays": lambda f: f([("alloc", 1, 512), ("alloc", 2, 512), ("free", 1, 512)]) == 512,
    "an address is used again": lambda f: f([("alloc", 1, 512), ("free", 1, 512), ("alloc", 1, 1024)]) == 1024,
    "no events": lambda f: f([]) == 0,
}
