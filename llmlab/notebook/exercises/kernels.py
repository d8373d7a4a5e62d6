"""Facts about the functions of yours/kernels.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...course.kernels import rungs
from ...simulation.ladder_traffic import interpreted

_device = "cuda" if torch.cuda.is_available() and not rungs.INTERPRETED else "cpu"


def _launched(kernel, rows=5, columns=100) -> tuple[Tensor, Tensor, Tensor]:
    a, b = torch.randn(2, rows, columns, device=_device)
    total, y = torch.zeros_like(a), torch.zeros_like(a)
    kernel[(rows,)](a, b, total, y, columns, BLOCK=128)
    return a + b, total, y


def _norm_is_right(kernel) -> bool:
    total, _, y = _launched(kernel)
    return torch.allclose(y, torch.nn.functional.rms_norm(total, (100,), eps=1e-5), atol=1e-5)


def _moves_little(kernel) -> bool:
    if not rungs.INTERPRETED:
        return True  # not counted there
    with interpreted() as launches:
        _launched(kernel)
    return launches[0].moved().asked == 4 * 5 * 100 * 4


add_and_norm = {
    "S is the sum": lambda f: torch.equal(*_launched(f())[:2]),
    "Y is its norm": lambda f: _norm_is_right(f()),
    "each value is moved once": lambda f: _moves_little(f()),
} if rungs.triton else {}  # fmt: skip

_row = 30 * torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

logsumexp_by_lanes = {
    "any number of lanes": lambda f: all(abs(f(_row, n) - _row.logsumexp(0)) < 1e-9 for n in (1, 8, 10, 1000)),
    "large values do not overflow": lambda f: abs(f(_row + 1e4, 8) - (_row + 1e4).logsumexp(0)) < 1e-6,
    "a lane of nothing but -inf": lambda f: abs(f(torch.tensor([1.0, -torch.inf, 2.0, -torch.inf]), 2) - 2.3133) < 1e-3,
}

bytes_loaded = {
    "tiles of 1 × 1 load two values per multiply-add": lambda f: f(8, 8, 8, 1, 1, 4) == 2 * 8**3 * 4,
    "tiles of 32 load the bytes that we counted": lambda f: f(64, 64, 64, 32, 32, 4) == 2 * 4 / 32 * 64**3,
    "a single tile loads each matrix once": lambda f: f(6, 4, 10, 6, 10, 2) == (6 * 4 + 4 * 10) * 2,
    "a wide tile loads less of x": lambda f: f(64, 8, 64, 8, 32, 1) == 64 * 8 * 2 + 8 * 64 * 8,
}

sectors = {
    "neighbors in fp32 need 4": lambda f: f(0, 1, 4) == 4,
    "neighbors in bf16 need 2": lambda f: f(0, 1, 2) == 2,
    "a start inside a sector needs one more": lambda f: f(3, 1, 4) == 5,
    "far apart, each thread needs its own": lambda f: f(0, 4096, 4) == 32,
    "every second value wastes half": lambda f: f(0, 2, 4) == 8,
}
