"""Facts about the functions that the page on LoRA asks for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...course.techniques.lora import LoRALinear, merge
from ...specs.run import LoRA


def _three_layers(merged: int = 0) -> tuple[Tensor, list[LoRALinear]]:
    """Return an input, and q, k and v in bf16 with different adapters, of which the first `merged` are merged."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for out, rank, alpha in ((32, 4, 8), (16, 2, 12), (16, 8, 2)):
        linear = nn.Linear(32, out, bias=False, dtype=torch.bfloat16)
        layer = LoRALinear(linear, LoRA(rank=rank, alpha=alpha, targets=("q_proj",)))
        for weight in layer.parameters():
            weight.data = 0.2 * torch.randn(weight.shape, generator=generator).to(weight.dtype)
        layers.append(layer)
    for layer in layers[:merged]:
        merge(layer)
    x = torch.randn(6, 32, generator=generator).bfloat16()
    return x.requires_grad_(), layers


def _one_by_one(x: Tensor, layers: list[LoRALinear]) -> list[Tensor]:
    return [layer(x) for layer in layers]


def _copies_saved(f) -> int | None:
    """Return how many fp32 tensors as large as x are saved for the backward pass."""
    x, layers = _three_layers()
    saved = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float32 and tensor.numel() == x.numel():
            saved.add(tensor.untyped_storage().data_ptr())
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []  # an address may be used again as soon as its tensor is freed
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = f(x, layers)
    return len(saved) if len(outputs) == 3 else None


def _near(f, merged: int = 0, gradients: bool = False) -> bool:
    """Return whether f gives the outputs, or the gradients, of the layers one by one."""
    results = []
    for way in (f, _one_by_one):
        x, layers = _three_layers(merged)
        outputs = way(x, layers)
        if gradients:
            trained = [x, *(matrix for layer in layers for matrix in (layer.A, layer.B))]
            outputs = torch.autograd.grad(torch.stack([y.float().square().sum() for y in outputs]).sum(), trained)
        results.append(outputs)
    mine, theirs = results
    return len(mine) == len(theirs) and all(
        a.dtype == b.dtype and torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05)
        for a, b in zip(mine, theirs, strict=True)
    )


from_one_copy = {
    "the outputs are those of the layers one by one, in bf16": _near,
    "so are the gradients of x and of each A and B": lambda f: _near(f, gradients=True),
    "one fp32 copy instead of three": lambda f: (_copies_saved(_one_by_one), _copies_saved(f)) == (3, 1),
    "a merged layer adds nothing": lambda f: _near(f, merged=1),
}


def _drawn(*ranks: int) -> list[tuple[Tensor, Tensor, float]]:
    """Return adapters of a weight of 20 × 30, with scales of 2, 3, 4 and so on."""
    draw = torch.Generator().manual_seed(sum(ranks))
    return [
        (torch.randn(rank, 30, generator=draw), torch.randn(20, rank, generator=draw), float(scale))
        for scale, rank in enumerate(ranks, 2)
    ]


def _sums(f, weights: tuple[float, ...], *ranks: int) -> bool:
    """Return whether f's ΔW is the weighted sum, with no higher rank than all have together."""
    A, B = f(_drawn(*ranks), list(weights))
    expected = torch.stack(
        [weight * scale * (b @ a) for weight, (a, b, scale) in zip(weights, _drawn(*ranks), strict=True)]
    ).sum(0)
    return torch.allclose(B @ A, expected, atol=1e-3) and A.shape[0] == B.shape[1] <= sum(ranks)


def _unchanged(f) -> bool:
    example = _drawn(2, 3)
    f(example, [0.5, -1.0])
    pairs = zip(example, _drawn(2, 3), strict=True)
    return all(torch.equal(x, y) for one, two in pairs for x, y in zip(one[:2], two[:2], strict=True))


combined = {
    "one adapter, with its scale": lambda f: _sums(f, (1.0,), 4),
    "two of the same rank": lambda f: _sums(f, (0.5, 0.5), 4, 4),
    "three of different ranks": lambda f: _sums(f, (1.0, 0.3, 2.0), 2, 8, 1),
    "a negative weight subtracts an adapter": lambda f: _sums(f, (1.0, -1.0), 3, 5),
    "the given adapters are not changed": _unchanged,
}
