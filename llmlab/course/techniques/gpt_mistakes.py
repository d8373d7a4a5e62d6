"""Mistakes that run and train: wrong attention, a wrong norm and wrong data for a GPT, and probes that reveal them.

B  sequences     S  tokens per sequence     h  hidden size     a  heads     d  size of a head     V  vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ...data import windows

# ---- probes


@torch.no_grad()
def influence(model: nn.Module, ids_S: Tensor) -> Tensor:
    """Return which tokens the logits depend on, bool (S, S): (t, s) is True if another token at s changes those at t.

    The logits are computed in fp64, so that rounding is far below any influence. A decoder has a lower triangle.
    """
    model, S = copy.deepcopy(model).double().eval(), len(ids_S)
    texts_SS = ids_S.repeat(S, 1)
    texts_SS[range(S), range(S)] = texts_SS.diagonal() ^ 1  # text s differs at token s
    before_SV, after_SSV = model(ids_S[None])[0], model(texts_SS)
    return ((after_SSV - before_SV).abs().amax(-1) > 1e-9).T


# ---- wrong attention


def attend_without_mask(q_BaSd: Tensor, k_BaSd: Tensor, v_BaSd: Tensor, *_: object) -> Tensor:
    """WRONG: every token attends to later ones, including the one that it has to predict."""
    return F.scaled_dot_product_attention(q_BaSd, k_BaSd, v_BaSd)


def attend_over_heads(q_BaSd: Tensor, k_BaSd: Tensor, v_BaSd: Tensor, *_: object) -> Tensor:
    """WRONG: tokens and heads are exchanged. The heads of a token attend to each other, and no token to another one."""
    q_BSad, k_BSad, v_BSad = (t.transpose(1, 2) for t in (q_BaSd, k_BaSd, v_BaSd))
    return F.scaled_dot_product_attention(q_BSad, k_BSad, v_BSad).transpose(1, 2)  # the shape is right again


# ---- another norm


class BatchNorm(nn.Module):
    """nn.BatchNorm1d over all tokens of a batch: a channel's mean and variance mix sequences and positions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x_BSh: Tensor) -> Tensor:
        return self.norm(x_BSh.flatten(0, 1)).view_as(x_BSh)


def with_norm(model: nn.Module, make: Callable[[int], nn.Module]) -> nn.Module:
    """Replace each LayerNorm of the GPT by `make(hidden size)`, and return the GPT."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LayerNorm):
            model.set_submodule(name, make(module.normalized_shape[0]))
    return model


# ---- data


class Windows(Dataset):
    """`count` random windows of a text, reproducible by seed: item i is (seq_len,) ids, cut out on access."""

    def __init__(self, ids: Tensor, seq_len: int, count: int, seed: int = 0) -> None:
        self.ids, self.seq_len, self.count, self.seed = ids, seq_len, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Tensor:
        return windows(self.ids, 1, self.seq_len, self.seed + i)[0]


class Stream(IterableDataset):
    """Consecutive windows of a text. With several DataLoader workers, each of them yields the whole stream."""

    def __init__(self, ids: Tensor, seq_len: int) -> None:
        self.ids, self.seq_len = ids, seq_len

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.ids[: len(self.ids) // self.seq_len * self.seq_len].view(-1, self.seq_len)


class SharedStream(Stream):
    """A stream that the workers of a DataLoader divide among themselves."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        n, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return islice(super().__iter__(), n, None, workers)  # every `workers`-th text from n on
