"""Facts about the functions of yours/attention.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_queries, _keys, _values = torch.randn(3, 200, 32, generator=torch.Generator().manual_seed(1))


def _attend(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, (M, d), and the log-sum-exp of the scores, (M, 1)."""
    scores = _queries @ keys.T / math.sqrt(keys.shape[1])
    return scores.softmax(1) @ values, scores.logsumexp(1, keepdim=True)


_out, _lse = _attend(_keys, _values)


def _merged(f, at: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    parts = [_attend(_keys[part] + shift, _values[part]) for part in (slice(at), slice(at, None))]
    return f(*parts[0], *parts[1])


merge = {
    "the output over all keys": lambda f: torch.allclose(_merged(f, 80)[0], _out, atol=1e-5),
    "their log-sum-exp": lambda f: torch.allclose(_merged(f, 80)[1], _lse, atol=1e-5),
    "parts of any size": lambda f: torch.allclose(_merged(f, 1)[0], _out, atol=1e-5),
    "large scores do not overflow": lambda f: bool(_merged(f, 80, 100.0)[0].isfinite().all()),
}


def _counted_from_mask(S: int, tile: int, window: int) -> int:
    i = torch.arange(S)
    seen = (i[:, None] >= i) & (i[:, None] - i < window)
    return int(seen.view(S // tile, tile, -1, tile).any(3).any(1).sum())


tiles_computed = {
    "a window as long as the sequence is causal": lambda f: f(512, 64, 512) == 8 * 9 // 2,
    "one tile": lambda f: f(64, 64, 64) == 1,
    "as counted from the mask": lambda f: all(f(512, 64, w) == _counted_from_mask(512, 64, w) for w in (64, 128, 320)),
    "linear in S": lambda f: f(2048, 64, 128) - f(1024, 64, 128) == f(3072, 64, 128) - f(2048, 64, 128),
}
