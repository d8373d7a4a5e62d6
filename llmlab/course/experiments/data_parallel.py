"""Every way of averaging gradients, in real processes, compared with a single process and with torch's DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..architectures.gpt import GPT
from ..techniques.accumulation import difference
from ..techniques.collectives import run_all, time_all_reduce
from ..techniques.data_parallel import Overlapped, average_gradients, flat_gradients, ring_all_reduce, spread
from ..techniques.training_loop import next_token_loss
from .job import tiny_gpt
from .train import make_job, train

BUCKETS = {"hooks": 0, "buckets": 100_000, "one bucket": 2**30}  # bytes; DDP's first bucket takes this model whole


def batch(sequences: int) -> Tensor:
    return torch.randint(tiny_gpt().vocab, (sequences, 16), generator=torch.Generator().manual_seed(1))  # (B, T)


def new_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(tiny_gpt())


def gradient(model: nn.Module) -> Tensor:
    return flat_gradients(list(model.parameters()))


def hook_the_parameter(model: nn.Module) -> None:
    """Average the parameter that the hook receives, instead of its gradient: a mistake found in teaching code."""

    def average(parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.data)
        parameter.data.div_(dist.get_world_size())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


def my_share(sequences: int) -> Tensor:
    """Return this rank's sequences of a batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return batch(sequences)[rank * sequences // ranks : (rank + 1) * sequences // ranks]


def backward_on(model: nn.Module, ids_BT: Tensor) -> nn.Module:
    """Return the model, with the gradients of its loss."""
    next_token_loss(model(ids_BT), ids_BT).backward()
    return model


def every_method(sequences: int) -> dict[str, dict]:
    """Average the gradients of this rank's share of a batch in every way. Every rank calls this function.

    Returns for each method: `whole`, the relative difference from the gradient of one process on the whole batch;
    `ddp`, whether the gradient equals that of torch's DDP bit for bit; `spread`, the largest difference between ranks;
    `messages` and `pending`, their numbers at the end of the backward pass; `sent`, the bytes sent divided by the bytes
    of the gradient; and facts of single methods.
    """
    mine = my_share(sequences)
    whole = gradient(backward_on(new_gpt(), batch(sequences)))
    wrapped = backward_on(nn.parallel.DistributedDataParallel(new_gpt()), mine)
    ddp = gradient(wrapped)
    rows: dict[str, dict] = {}

    def note(name: str, model: nn.Module, **facts) -> None:
        flat, ranks_differ = gradient(model), spread(model)
        rows[name] = {"whole": difference(flat, whole), "ddp": torch.equal(flat, ddp), "spread": ranks_differ, **facts}

    note("torch DDP", wrapped)
    model = backward_on(new_gpt(), mine)
    note("no averaging", model)
    sent = average_gradients(model)
    note("naive", model, messages=len(list(model.parameters())), sent=sent / (4 * whole.numel()))
    for name, bucket_bytes in BUCKETS.items():
        model = new_gpt()
        averaged = Overlapped(model, bucket_bytes)
        backward_on(model, mine)
        pending = len(averaged.pending)
        averaged.wait()
        note(name, model, messages=averaged.messages, pending=pending)
    model, averaged, spread_before = two_micro_batches(mine)
    note("no_sync", model, messages=averaged.messages, spread_before=spread_before)
    model = new_gpt()
    hook_the_parameter(model)
    before = [p.detach().clone() for p in model.parameters()]
    backward_on(model, mine)
    unchanged = all(torch.allclose(p, b) for p, b in zip(model.parameters(), before, strict=True))
    note("the parameter", model, unchanged=unchanged, messages=len(before))
    return rows


def two_micro_batches(mine: Tensor) -> tuple[nn.Module, Overlapped, float]:
    """Return a model whose gradients are averaged after the second of two micro-batches, and their spread before."""
    model = new_gpt()
    averaged = Overlapped(model)
    half = len(mine) // 2 or 1
    with averaged.no_sync():
        (next_token_loss(model(mine[:half]), mine[:half]) * half / len(mine)).backward()
    before = spread(model)
    second = mine[half:]
    (next_token_loss(model(second), second) * len(second) / len(mine)).backward()
    averaged.wait()
    return model, averaged, before


def train_wrongly(sequences: int, steps: int) -> dict[str, list[float]]:
    """Train with the mistaken hooks; return the losses on this rank's share, and the spread of the gradients."""
    mine, model = my_share(sequences), new_gpt()
    hook_the_parameter(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, spreads = [], []
    for _ in range(steps):
        loss = next_token_loss(model(mine), mine)
        loss.backward()
        spreads.append(spread(model))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "spreads": spreads}


def chapter(sequences: int, elements: int, sizes: list[int]) -> dict:
    """Run all experiments of the page in one launch, because processes take longer to start than to run them."""
    return {
        "collectives": run_all(),
        "ring": ring_all_reduce(torch.ones(elements)),  # the bytes that a rank sends to sum fp32 numbers
        "methods": every_method(sequences),
        "wrong": train_wrongly(sequences, 10),
        "trained": train(make_job("data_parallel", dist.get_world_size(), 12, method="naive", steps=3)),
        "seconds": time_all_reduce(sizes),
    }
