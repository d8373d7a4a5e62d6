"""The sums by hand of the chapter on optimizers are those of the estimates and of the operators that torch runs."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import llmlab as lab
from llmlab.course.job import GPU, MODEL, job
from llmlab.formulas.time.efficiency import efficiency

L, h, f, V, k, d, S = 16, 2048, 8192, 128_256, 8, 64, 1024
N = L * (2 * h * h + 2 * k * d * h + 3 * h * f + 2 * h) + V * h + h
FACTORS = L * (2 * 2 * h + 2 * (k * d + h) + 3 * (h + f) + 2 * h) + (V + h) + h
BEFORE = job("06-accumulation")


class Traffic(TorchDispatchMode):
    """Counts the numbers that operators read and write; views and numbers on the host are free."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::view", "aten::_local_scalar_dense", "aten::detach"):
            return result
        arguments = zip(args, func._schema.arguments, strict=False)
        written = [value for value, one in arguments if one.alias_info and one.alias_info.is_write]
        for tensor in (*tree_leaves((args, kwargs)), *tree_leaves(written or result)):
            if torch.is_tensor(tensor):
                self.elements += tensor.numel()
        return result


@pytest.mark.parametrize(
    ("optimizer", "passes"),
    [
        (lambda w: torch.optim.AdamW(w, foreach=True), 21),
        (lambda w: torch.optim.Adafactor(w), 17),
    ],
)
def test_reads_and_writes_of_an_update(optimizer, passes):
    layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(3))
    optimizer = optimizer(layers.parameters())
    for w in layers.parameters():
        w.grad = torch.randn_like(w)
    optimizer.step()  # creates the states
    with Traffic() as traffic:
        optimizer.step()
    assert traffic.elements / sum(w.numel() for w in layers.parameters()) == pytest.approx(passes, rel=0.01)


@pytest.mark.parametrize(("optimizer", "passes"), [("adamw", 21), ("adamw-fused", 7), ("adafactor", 17)])
def test_the_time_of_an_update(optimizer, passes):
    report = lab.estimate(MODEL, replace(BEFORE, optimizer=optimizer), GPU)
    launches = 8 * N / (320 * 65536) if optimizer == "adamw" else 0  # 8 operators on lists, a kernel per 320 · 65,536
    by_hand = 4 * passes * N / efficiency(GPU).bandwidth + launches * efficiency(GPU).launch
    assert report.time["optimizer"] == pytest.approx(by_hand, rel=1e-6)


def test_adafactor_stores_a_row_and_a_column():
    report = lab.estimate(MODEL, job("07-optimizers"), GPU)
    assert FACTORS == 902_400
    assert report.parts["optimizer"] == pytest.approx(4 * FACTORS, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [("adamw", 20 * N), ("adamw-fused", 16 * N), ("adafactor", 8 * N + 4 * V * h + 4 * FACTORS)],
)
def test_the_peak_of_the_update(optimizer, size):
    report = lab.estimate(MODEL, replace(BEFORE, optimizer=optimizer), GPU)
    assert report.phases["optimizer"] == pytest.approx(size + 2 * V * S + 2**24, rel=1e-3)


def test_only_adafactor_and_sgd_fit_after_checkpointing():
    room = lab.gpu(GPU).room(1)
    peaks = {
        name: lab.estimate(MODEL, replace(job("08-checkpointing"), optimizer=name), GPU).peak_allocated
        for name in ("adamw", "adamw-fused", "adamw-8bit", "lion", "adafactor", "sgd")
    }
    assert {name for name, peak in peaks.items() if peak < room} == {"adafactor", "sgd"}
    assert peaks["adamw-8bit"] - room < 2**30
