"""Facts about the functions of yours/trainer.py, in the order of the chapters."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import cache

import torch
from torch import Tensor, nn

from ...course.architectures.gpt import in_order
from ...course.techniques.accumulation import backward_exact, difference, gradient, pad
from ...data import batch
from ...formulas.report import estimated
from ...hardware.gpu import gpu
from ...specs.run import Training

# ---- chapter 2


def _gpt2_peak(micro_batch: int) -> int:
    return estimated("gpt2", Training(micro_batch=micro_batch, seq_len=1024), "T4").peak_allocated or 0


def _largest_by_trying(room: int) -> int:
    return max(b for b in range(1, 17) if _gpt2_peak(b) <= room)


_room = gpu("T4").room()

largest = {
    "10 bytes, and 5 for each sequence": lambda f: f(lambda b: 10 + 5 * b, 31) == 4,
    "exactly full": lambda f: f(lambda b: 10 + 5 * b, 30) == 4,
    "not even one": lambda f: f(lambda b: 10 + 5 * b, 14) == 0,
    "one may peak in the update": lambda f: [f(lambda b: max(10 + 5 * b, 18), room) for room in (17, 18)] == [0, 1],
    "GPT-2 on a T4": lambda f: f(_gpt2_peak, _room) == _largest_by_trying(_room),
}

# ---- chapter 4

_initial = torch.linspace(-1, 1, 4)
_unit = _initial / _initial.norm()


def _after_update(f, factor: float) -> tuple[Tensor, Tensor | None, float]:
    """Return the weight, its gradient and the scale after one update of SGD on factor · |w|²."""
    weight = nn.Parameter(_initial.clone())
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
    f(factor * weight.square().sum(), optimizer, scaler, 1.0)
    return weight.detach(), weight.grad, scaler.get_scale()


def _no_gradient(f) -> bool:
    left = _after_update(f, 1)[1]
    return left is None or not left.any()


amp_update = {
    "a large gradient is clipped to norm 1": lambda f: torch.allclose(_after_update(f, 100)[0], _initial - 0.1 * _unit),
    "a small one is not": lambda f: torch.allclose(_after_update(f, 0.01)[0], _initial * (1 - 0.002)),
    "overflow changes no weight": lambda f: torch.equal(_after_update(f, math.inf)[0], _initial),
    "overflow halves the scale": lambda f: _after_update(f, math.inf)[2] == 2.0**15,
    "no gradient is left": _no_gradient,
}

# ---- chapter 6


@cache
def _tiny() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    ))  # fmt: skip


_EQUAL = [64] * 8
_UNEQUAL = [8, 120, 16, 128, 4, 90, 30, 64]


def _as_one_batch(f, lengths: list[int], size: int, dirty: bool = False) -> bool:
    """Whether SGD moves the weights by the gradient of one batch, if `f` sees `size` sequences per micro-batch."""
    sequences = [ids[:length] for ids, length in zip(batch(512, len(lengths), 128), lengths, strict=True)]
    truth, model = deepcopy(_tiny()), deepcopy(_tiny())
    backward_exact(truth, [pad(sequences)])
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight) if dirty else None
    micro_batches = [pad(sequences[n : n + size]) for n in range(0, len(sequences), size)]
    f(model, micro_batches, torch.optim.SGD(model.parameters(), lr=1.0))
    return difference(start - nn.utils.parameters_to_vector(model.parameters()).detach(), gradient(truth)) < 1e-4


accumulate = {
    "equal lengths": lambda f: _as_one_batch(f, _EQUAL, 2),
    "unequal lengths": lambda f: _as_one_batch(f, _UNEQUAL, 1),
    "a short last group": lambda f: _as_one_batch(f, _UNEQUAL[:7], 3),
    "old gradients are cleared": lambda f: _as_one_batch(f, _EQUAL, 4, dirty=True),
}

_chats = [1024, 640, 820, 360, 512, 480, 1000, 560]

split = {
    "equal lengths fill the room": lambda f: f([10] * 5, 20) == [[10, 10], [10, 10], [10]],
    "padding counts": lambda f: f([10, 1, 1], 20) == [[10, 1], [1]],
    "a longer one pads those before it": lambda f: f([1, 1, 10], 20) == [[1, 1], [10]],
    "nothing is lost": lambda f: [n for group in f(_chats, 2048) for n in group] == _chats,
}

_two = [[5, 6, 7, 0], [8, 0]]  # 0 ends a text, and is also the padding

collate = {
    "ids are as wide as the longest text": lambda f: f(_two, 0)[0].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]],
    "ends have labels, padding has none": lambda f: f(_two, 0)[1].tolist() == [[5, 6, 7, 0], [8, 0, -100, -100]],
    "a single text needs no padding": lambda f: f([[3, 4]], 0)[1].tolist() == [[3, 4]],
}

pack = {
    "equal texts fill the rows": lambda f: f([8, 8, 8], 16) == [[8, 8], [8]],
    "the first row with room": lambda f: f([10, 9, 3, 5], 16) == [[10, 5], [9, 3]],
    "nothing is lost": lambda f: sorted(n for row in f(_chats, 1024) for n in row) == sorted(_chats),
    "the eight chats need six rows": lambda f: len(f(_chats, 1024)) == 6,
}

# ---- chapter 7, and its pages on learning rates


def _decays(f, change: Callable[[nn.ModuleDict], object] = lambda net: None) -> dict[str, float | None]:
    """Return the decay of each parameter by its name."""
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "b": nn.Linear(4, 4, bias=False)})
    change(net)
    optimizer = torch.optim.AdamW(f(net, 0.1))  # raises if a parameter is listed twice
    decays = {id(w): group["weight_decay"] for group in optimizer.param_groups for w in group["params"]}
    return {name: decays.get(id(w)) for name, w in net.named_parameters()}


def _tie(net: nn.ModuleDict) -> None:
    net["b"].weight = net["a"].weight


parameter_groups = {
    "matrices decay": lambda f: _decays(f)["a.weight"] == _decays(f)["b.weight"] == 0.1,
    "norms and biases do not": lambda f: _decays(f)["norm.weight"] == _decays(f)["a.bias"] == 0,
    "frozen ones are left out": lambda f: _decays(f, lambda n: n["a"].requires_grad_(False))["a.weight"] is None,
    "a tied one is there once": lambda f: _decays(f, _tie)["a.weight"] == 0.1,
}

factor = {
    "the first step is not lost": lambda f: abs(f(0, 10, 20, 100) - 0.1) < 1e-9,
    "the warm-up ends at 1": lambda f: f(9, 10, 20, 100) == f(10, 10, 20, 100) == 1,
    "the plateau is flat": lambda f: f(79, 10, 20, 100) == f(80, 10, 20, 100) == 1,
    "half of the decay": lambda f: abs(f(90, 10, 20, 100) - 0.5) < 1e-9,
    "it ends at 0 and stays there": lambda f: f(100, 10, 20, 100) == f(130, 10, 20, 100) == 0,
}


def _scaled(f, limit: float = 1.0, infinite: bool = False) -> tuple[float, Tensor, float]:
    """Return the norm from `f`, the weights after one step of SGD with the gradient (3, 4), and the scale."""
    w = nn.Parameter(torch.zeros(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = (w * torch.tensor([3.0, 4.0])).sum() * (math.inf if infinite else 1.0)
    norm = f(loss, [w], torch.optim.SGD([w], lr=1.0), scaler, limit)
    return float(norm), w.detach(), scaler.get_scale()


scaled_update = {
    "the norm is that of the true gradients": lambda f: abs(_scaled(f)[0] - 5.0) < 1e-3,
    "a long gradient is clipped": lambda f: torch.allclose(_scaled(f)[1], torch.tensor([-0.6, -0.8]), atol=1e-3),
    "a short one is not": lambda f: torch.allclose(_scaled(f, limit=9.0)[1], torch.tensor([-3.0, -4.0]), atol=1e-3),
    "an overflow skips the step": lambda f: _scaled(f, infinite=True)[1].tolist() == [0.0, 0.0],
    "an overflow halves the scale": lambda f: _scaled(f, infinite=True)[2] == 512.0,
}


def _settings(f, ratio: int) -> dict[str, tuple[float, float] | None]:
    """Return the learning rate and the weight decay of each parameter by its name."""
    net = nn.ModuleDict({
        "embed": nn.Embedding(8, 4), "layers": nn.ModuleList([nn.Linear(4, 4)]),
        "norm": nn.LayerNorm(4), "head": nn.Linear(4, 8, bias=False),
    })  # fmt: skip
    optimizer = torch.optim.AdamW(f(net, 0.01, 0.1, ratio))  # raises if a parameter is listed twice
    settings = {
        id(w): (round(group["lr"], 6), round(group["weight_decay"], 6))
        for group in optimizer.param_groups for w in group["params"]
    }  # fmt: skip
    return {name: settings.get(id(w)) for name, w in net.named_parameters()}


def _ends_keep_their_rate(f) -> bool:
    return _settings(f, 4)["embed.weight"] == _settings(f, 4)["head.weight"] == (0.01, 0.1)


scaled_groups = {
    "at the base nothing changes": lambda f: set(_settings(f, 1).values()) == {(0.01, 0.1)},
    "hidden matrices": lambda f: _settings(f, 4)["layers.0.weight"] == (0.0025, 0.4),
    "their biases are no matrices": lambda f: _settings(f, 4)["layers.0.bias"] == (0.01, 0.1),
    "embedding and head keep their rate": _ends_keep_their_rate,
}


def _noise(f, true=2.0, deviation=3.0, tokens=10, count=4000) -> float:
    """Return the result for gradients with a known noise scale of deviation² / true² tokens."""
    rows = true + deviation / tokens**0.5 * torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    return float(f(rows, tokens))


noise_scale_of = {
    "two micro-batches, by hand": lambda f: abs(float(f(torch.tensor([[1.0, 2.0], [3.0, 2.0]]), 4)) - 8 / 7) < 1e-4,
    "no noise": lambda f: abs(float(f(torch.ones(4, 3), 8))) < 1e-4,
    "a known noise": lambda f: abs(_noise(f) / 2.25 - 1) < 0.05,
    "it does not depend on the micro-batch": lambda f: abs(_noise(f, tokens=100) / 2.25 - 1) < 0.05,
}

take_step = {
    "a usual norm is taken": lambda f: f(1.2, [1.0, 1.1, 0.9, 1.0]) is True,
    "a spike is not": lambda f: f(9.0, [1.0, 1.1, 0.9, 1.0]) is False,
    "not even after an earlier spike": lambda f: f(9.0, [1.0, 30.0, 0.9, 1.0]) is False,
    "only the last norms count": lambda f: f(9.0, [1.0] * 9 + [4.0] * 4) is True,
    "at the start every step is taken": lambda f: f(9.0, [1.0, 1.0]) is True,
}

# ---- chapter 8


def _runs(f, n: int) -> tuple[list[int], bool]:
    """Return how often each of six blocks runs in a step under f, and whether the gradient of x is the usual one."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5)) for _ in range(6)]
    calls: list[int] = []
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    x = torch.randn(4, 8, requires_grad=True)
    gradients: list[Tensor] = []
    for way in (lambda blocks, x, n: in_order(blocks, x), f):
        torch.manual_seed(1)
        calls.clear()
        gradients += torch.autograd.grad(way(blocks, x, n).sum(), x)
    return [calls.count(number) for number in range(6)], torch.equal(*gradients)


first_blocks = {
    "two of six run twice": lambda f: _runs(f, 2)[0] == [2, 2, 1, 1, 1, 1],
    "none, and all": lambda f: (sum(_runs(f, 0)[0]), sum(_runs(f, 6)[0])) == (6, 12),
    "the gradient is the usual one, with dropout": lambda f: _runs(f, 4)[1],
}


def _gradients(run: Callable[[nn.Module, Tensor], Tensor], dropout: float) -> Tensor:
    """Return the gradients of four blocks in a chain."""
    torch.manual_seed(0)
    x = torch.randn(8, 64, requires_grad=True)
    blocks = [
        nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Dropout(dropout), nn.Linear(256, 64)) for _ in range(4)
    ]
    for block in blocks:
        x = run(block, x)
    x.square().mean().backward()
    return gradient(nn.ModuleList(blocks))


def _usual(f, dropout: float) -> bool:
    return torch.equal(_gradients(f, dropout), _gradients(lambda block, x: block(x), dropout))


def _linears_finished(f) -> tuple[int, int]:
    """Return how often the two linear layers of a block finish in a forward and backward pass under f."""
    block = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 8))
    finished: list[int] = []
    for number in (0, 3):
        block[number].register_forward_hook(lambda *_, number=number: finished.append(number))
    f(block, torch.randn(4, 8, requires_grad=True)).sum().backward()
    return finished.count(0), finished.count(3)


by_hooks_early = {
    "the gradients are the usual ones": lambda f: _usual(f, 0.0),
    "also with dropout": lambda f: _usual(f, 0.1),
    "the first linear layer runs twice, the last one once": lambda f: _linears_finished(f) == (2, 1),
}

# ---- chapter 9


def _agrees(f, ignored: int, count: int, scale: float = 1.0) -> bool:
    """Whether loss and gradients are those of PyTorch, if the first `ignored` targets do not count."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (50, 90))
    targets = torch.randint(90, (50,))
    targets[:ignored] = -100
    usual = nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum") / count
    ours = f(hidden, weight, targets, count, 8)
    gradients = [torch.autograd.grad(losses * scale, (hidden, weight)) for losses in (ours, usual)]
    return torch.allclose(ours, usual) and all(map(torch.allclose, *gradients))


def _survives_autocast(f) -> bool:
    """Whether a scaled loss has the usual gradients if autocast makes its logits fp16."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16, requires_grad=True) for n in (50, 90))
    targets = torch.randint(90, (50,))
    gradients: list[Tensor] = []
    with torch.autocast("cpu", torch.float16):
        losses = f(hidden, weight, targets, 50, 8), nn.functional.cross_entropy(hidden @ weight.T, targets)
    for loss in losses:
        gradients += torch.autograd.grad(loss * 2.0**16, (hidden, weight))
    return all(difference(ours, usual) < 0.01 for ours, usual in zip(gradients[:2], gradients[2:], strict=True))


fused_loss = {
    "loss and gradients": lambda f: _agrees(f, 0, 50),
    "targets of -100 do not count": lambda f: _agrees(f, 11, 39),
    "loss scaling reaches the gradients": lambda f: _agrees(f, 3, 47, scale=1024.0),
    "fp16 logits do not overflow": _survives_autocast,
}

largest_chunk = {
    "a quarter of a GiB for Llama 3": lambda f: f(4096, 128_256, 2**28) == 1024,
    "never more than T": lambda f: f(512, 1000, 2**30) == 512,
    "exactly full": lambda f: f(64, 100, 2 * 100 * 8) == 8,
    "at least one token": lambda f: f(64, 100, 200) == 1,
}
