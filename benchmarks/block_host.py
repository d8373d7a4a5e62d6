"""Measure what FSDP2's hooks and DTensor take of the host in a block, beside the block's own operators.

    PYTHONPATH=.:_build/stacks python benchmarks/block_host.py

The blocks are torchtitan's: whole, sharded by FSDP2, and divided as its apply_tp divides them too, over process groups
that send nothing; they are so small that only Python, the dispatcher and DTensor take time. What four more blocks add
is four blocks', without the embedding and the head. formulas/time/host.py has the differences.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, LAYERS, LENGTH = 2, (2, 6), 16  # ranks of each kind
WARM, ROUNDS = 5, 60
SIZES = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128, "multiple_of": 16}


def passes(layers: int, kind: str) -> Callable[[], tuple[float, float]]:
    """Return a function that runs a model forward and backward, and returns the CPU's seconds of each."""
    from torchtitan.models.llama3.infra.parallelize import apply_tp
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    mesh = init_device_mesh("cpu", (RANKS, RANKS), mesh_dim_names=("dp", "tp"))
    model = Transformer(TransformerModelArgs(**SIZES, n_layers=layers, max_seq_len=LENGTH))
    if kind == "divided":
        apply_tp(model, mesh["tp"], loss_parallel=True, enable_float8_tensorwise_tp=False)
    for module in () if kind == "whole" else (*model.layers.values(), model):
        fully_shard(module, mesh=mesh["dp"])
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)

    def run() -> tuple[float, float]:
        start = time.thread_time()
        logits = model(tokens)
        forward = time.thread_time() - start
        loss = (logits.to_local() if isinstance(logits, DTensor) else logits).sum()
        start = time.thread_time()
        loss.backward()
        return forward, time.thread_time() - start

    return run


def milliseconds(kind: str) -> tuple[float, float]:
    """Return the milliseconds of a block, forward and backward: of each model the least of several."""
    few, many = (passes(layers, kind) for layers in LAYERS)
    times = [(few(), many()) for _ in range(WARM + ROUNDS)][WARM:]
    least = [[min(both[model][way] for both in times) for way in (0, 1)] for model in (0, 1)]
    forward, backward = (1e3 * (more - less) / (LAYERS[1] - LAYERS[0]) for less, more in zip(*least, strict=True))
    return forward, backward


def main() -> None:
    """Print the milliseconds of a block, and what each kind takes more than the one before."""
    torch.set_num_threads(1)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS**2)
    print(f"torch {torch.__version__}, milliseconds forward and backward")
    before = (0.0, 0.0)
    for kind in ("whole", "sharded", "divided"):
        found = milliseconds(kind)
        more = ", ".join(f"{now - then:.2f}" for now, then in zip(found, before, strict=True))
        print(f"{kind}: {found[0]:.2f}, {found[1]:.2f}; more: {more}")
        before = found
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
