"""Each update rule from scratch takes the same steps as the library's, and keeps the bytes that the formula says."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llmlab.course.experiments.optimizers import update_beside
from llmlab.course.techniques import optimizers as scratch
from llmlab.course.techniques.learning_rate import clip_gradients, warmup_cosine, warmup_stable_decay
from llmlab.course.techniques.memory_anatomy import model_states
from llmlab.course.techniques.optimizers_8bit import CPU_BINS, AdamW8bit, dequantize, dynamic_code, quantize
from llmlab.formulas.memory.precision import bytes_per_parameter, state_bytes

bnb = pytest.importorskip("bitsandbytes", reason="the 8-bit oracle is bitsandbytes: pip install 'llmlab[quant]'")
transformers = pytest.importorskip("transformers")

# Ours and the library's, with the same settings. In 30 steps a weight below 1 is rounded 30 times, by 2^-24 at most:
# 2e-6, and five times that as gradients follow the weights. 0 (bit for bit) where the operations are the same.
PAIRS = {
    "sgd": (scratch.SGD, torch.optim.SGD, {}, 0),
    "momentum": (scratch.SGD, torch.optim.SGD, {"momentum": 0.9}, 1e-5),
    "nesterov": (scratch.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 1e-5),
    "adam": (scratch.Adam, torch.optim.Adam, {}, 1e-5),
    "adam with L2": (scratch.Adam, torch.optim.Adam, {"weight_decay": 0.1}, 1e-5),
    "adamw": (scratch.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}, 1e-5),
    "adafactor": (scratch.Adafactor, torch.optim.Adafactor, {}, 1e-5),
    "lion": (scratch.Lion, bnb.optim.Lion, {"weight_decay": 0.1}, 0),
}


def linear_code(signed=True):
    """256 equally spaced values, as int8 has."""
    return torch.linspace(-1 if signed else 0, 1, 256)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, 96), nn.Linear(96, 4)).to(dtype)


def trained(model, optimizer, steps=30):
    """Train on noise whose size changes from step to step and differs between columns; returns the model."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-2, 1, 48)
    for _ in range(steps):
        x = torch.randn(16, 48, generator=generator) * sizes
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def furthest(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", PAIRS)
def test_thirty_steps_are_the_librarys(name):
    ours, theirs, kwargs, tolerance = PAIRS[name]
    one, other = network(), network()
    trained(one, ours(one.parameters(), lr=0.01, **kwargs))
    trained(other, theirs(other.parameters(), lr=0.01, **kwargs))
    assert furthest(one, network()) > 0.01, "nothing was trained"
    assert furthest(one, other) <= tolerance


def test_adafactor_is_also_transformers():
    """transformers adds 1e-30 to each square, torch bounds the estimate from below: equal but for tiny gradients."""
    one, other = network(), network()
    trained(one, scratch.Adafactor(one.parameters(), lr=1e-2))
    theirs = transformers.Adafactor(other.parameters(), scale_parameter=True, relative_step=True, warmup_init=False)
    trained(other, theirs)
    assert furthest(one, other) <= 1e-5 < 1e-3 < furthest(one, network())


def test_adafactor_factors_the_last_two_axes_and_slows_down_from_a_large_rate():
    """torch takes the smaller of lr and 1 / √t, and a convolution's weight as a stack of matrices."""
    generator = torch.Generator().manual_seed(0)
    one, other = (nn.Parameter(torch.ones(3, 5, 7)) for _ in range(2))
    ours, theirs = scratch.Adafactor([one], lr=0.5), torch.optim.Adafactor([other], lr=0.5)
    for _ in range(20):
        one.grad = torch.randn(3, 5, 7, generator=generator) * torch.arange(1, 4)[:, None, None]
        other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    assert torch.allclose(one, other, rtol=0, atol=1e-5)


def test_adam_with_l2_is_not_adamw():
    """Decoupled decay shrinks a weight by 1 − lr·λ per step, whatever its gradient. L2 through Adam moves the weight by
    lr per step: λw divided by its own root mean square is only the sign of w."""
    w = {name: nn.Parameter(torch.tensor([1.0, 100.0])) for name in ("adamw", "adam")}
    rules = {"adamw": scratch.AdamW, "adam": scratch.Adam}
    for name, weight in w.items():
        optimizer = rules[name]([weight], lr=0.01, weight_decay=0.1)
        for _ in range(10):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
    assert torch.allclose(w["adamw"], torch.tensor([1.0, 100.0]) * (1 - 0.01 * 0.1) ** 10)
    assert torch.allclose(w["adam"], torch.tensor([1.0, 100.0]) - 10 * 0.01, atol=1e-3)


def test_sgd_with_l2_is_decoupled_decay():
    """For SGD, L2 and decay are the same: that is where the name weight decay comes from."""
    one, other = (nn.Parameter(torch.tensor([3.0])) for _ in range(2))
    one.grad, other.grad = torch.tensor([0.5]), torch.tensor([0.5])
    scratch.SGD([one], lr=0.1, weight_decay=0.2).step()
    with torch.no_grad():
        other.mul_(1 - 0.1 * 0.2).sub_(0.1 * other.grad)
    assert torch.allclose(one, other)


# ---- 8 bits


def test_the_values_of_a_byte_are_bitsandbytes():
    for signed in (True, False):
        theirs = bnb.functional.create_dynamic_map(signed)
        assert len(dynamic_code(signed).unique()) == 256
        assert torch.equal(dynamic_code(signed), theirs)


lengths, scales, seeds = st.integers(1, 2000), st.floats(-30, 20), st.integers(0, 2**31)


def numbers(length, scale, seed, signed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, generator=generator) * torch.exp(3 * torch.randn(length, generator=generator)) * 2.0**scale
    x[::7] = 0
    return x if signed else x.abs()


@settings(deadline=None, max_examples=40)
@given(lengths, scales, seeds, st.booleans())
def test_the_bytes_are_those_of_bitsandbytes_cpu_kernel(length, scale, seed, signed):
    x, code = numbers(length, scale, seed, signed), dynamic_code(signed)
    index, absmax = quantize(x, code, bins=CPU_BINS)
    theirs, state = bnb.functional.quantize_blockwise(x, code=code, blocksize=256)
    assert torch.equal(absmax, state.absmax)
    assert torch.equal(index, theirs)
    assert torch.equal(dequantize(index, absmax, code), bnb.functional.dequantize_blockwise(theirs, state))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), scales, seeds, st.booleans())
def test_without_bins_the_bytes_are_those_of_bitsandbytes_plain_kernel(blocks, scale, seed, signed):
    """bitsandbytes' backend "default", in PyTorch, finds the nearest of the 256 values, as the CUDA kernel does."""
    x, code = numbers(256 * blocks, scale, seed, signed), dynamic_code(signed)
    index, absmax = quantize(x, code)
    default = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    theirs, scale = torch.ops.bitsandbytes.quantize_blockwise.default.redispatch(default, x, code, 256)
    assert torch.equal(absmax, scale)
    assert torch.equal(index, theirs)


class SameGradients:
    """Steps our optimizer, and theirs with a copy of our gradients.

    Gradients of its own would do on one thread only: on two, sums round by chance, and one byte that falls on the other
    side of a middle sends the runs apart.
    """

    def __init__(self, ours, theirs):
        self.ours, self.theirs = ours, theirs

    def zero_grad(self):
        self.ours.zero_grad()

    def step(self):
        groups = zip(self.ours.param_groups, self.theirs.param_groups, strict=True)
        for w, theirs_w in ((w, v) for a, b in groups for w, v in zip(a["params"], b["params"], strict=True)):
            theirs_w.grad = w.grad.clone()
        self.ours.step()
        self.theirs.step()


def test_8bit_adamw_takes_bitsandbytes_steps_byte_for_byte():
    one, other = network(), network()
    ours = AdamW8bit(one.parameters(), lr=0.01, weight_decay=0.1, bins=CPU_BINS)
    theirs = bnb.optim.AdamW8bit(other.parameters(), lr=0.01, weight_decay=0.1)
    trained(one, SameGradients(ours, theirs))
    assert furthest(one, other) <= 1e-3 < 1e-2 < furthest(one, network()), "a byte that differs is 3% of a step's 0.01"
    kinds = set()
    for w, theirs_w in zip(one.parameters(), other.parameters(), strict=True):
        mine, state = ours.state[w], theirs.state[theirs_w]
        assert mine["m"].dtype == state["state1"].dtype, "which tensors are quantized"
        kinds.add(mine["m"].dtype)
        if mine["m"].dtype == torch.uint8:
            off = (mine["v"].int() - state["state2"].int()).abs()
            assert off.max() <= 1 and off.float().mean() < 0.01, "bytes differ where fp32 rounding crosses a middle"
    assert kinds == {torch.uint8, torch.float32}


def test_8_bits_follow_32_bits():
    """A quantized moment is wrong by some percent, and the loss falls nearly as far."""
    losses = {}
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(2))
    for rule in (scratch.AdamW, AdamW8bit):
        model = network()
        before = model(x).square().mean().item()
        trained(model, rule(model.parameters(), lr=1e-3))
        losses[rule] = model(x).square().mean().item() / before
    assert losses[scratch.AdamW] < 0.9
    assert losses[AdamW8bit] == pytest.approx(losses[scratch.AdamW], abs=0.1)


def test_dynamic_values_reach_seven_powers_of_ten_and_linear_two():
    smallest = {code: code(signed=False)[1].item() for code in (dynamic_code, linear_code)}
    assert smallest[dynamic_code] < 1e-6 and smallest[linear_code] > 1e-3


def test_an_outlier_sends_the_second_moments_of_its_block_to_zero():
    """Then the update is m / ε, which is not some percent but hundreds of times too large."""
    block, other = slice(1, 256), slice(256, None)
    sound = [update_beside(1e4, scratch.AdamW, where) for where in (block, other)]
    in_8_bits = partial(update_beside, rule=AdamW8bit, min_8bit_size=0)
    assert sound[0] == pytest.approx(sound[1], rel=0.1), "32-bit Adam does not see the neighbour"
    assert in_8_bits(1e4) > 100 * sound[0]
    assert in_8_bits(1e4, where=other) == pytest.approx(sound[1], rel=0.05), "that is what the blocks are for"
    assert in_8_bits(1e4, where=other, block=512) > 100 * sound[1]
    assert in_8_bits(100) == pytest.approx(sound[0], rel=0.5), "what 8 bits stand"
    assert in_8_bits(100, code=linear_code) > 100 * sound[0], "int8 does not"
    assert in_8_bits(1e4, bins=CPU_BINS) < 0.1 * sound[0], "the CPU kernel stops"


# ---- memory


@pytest.mark.parametrize(
    ("rule", "name"),
    [(scratch.SGD, "sgd"), (scratch.AdamW, "adamw"), (scratch.Lion, "lion"), (AdamW8bit, "adamw-8bit"),
     (scratch.Adafactor, "adafactor")],
)  # fmt: skip
def test_states_take_the_bytes_that_the_formula_says(rule, name):
    model = nn.Linear(256, 1024, bias=False)
    optimizer = trained_once(model, rule(model.parameters(), lr=1e-3))
    expected = state_bytes(name, 4, 256 * 1024, factored=256 + 1024)
    assert model_states(model, optimizer)["optimizer"] == expected
    if name != "adafactor":
        assert expected / (256 * 1024) == bytes_per_parameter("fp32", name) - 8


def trained_once(model, optimizer):
    model(torch.randn(2, 256)).sum().backward()
    optimizer.step()
    return optimizer


# ---- clipping and schedules


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.floats(0.01, 100), seeds)
def test_clipping_is_torchs(sizes, most, seed):
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for _ in range(2):
        groups.append([nn.Parameter(torch.zeros(size)) for size in sizes])
    for a, b in zip(*groups, strict=True):
        a.grad = torch.randn(a.shape, generator=generator)
        b.grad = a.grad.clone()
    norm = clip_gradients(groups[0], most)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(groups[1], most).item(), rel=1e-5)
    for a, b in zip(*groups, strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=0)
    after = torch.cat([w.grad for w in groups[0]]).norm().item()
    assert after <= most * (1 + 1e-5)
    assert norm > most or after == pytest.approx(norm.item(), rel=1e-5), "what is below the limit stays"


def factors(make, steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize("least", [0.0, 0.1])
def test_warmup_cosine_is_transformers(least):
    def make(optimizer):
        if not least:
            return transformers.get_cosine_schedule_with_warmup(optimizer, 10, 100)
        return transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, 10, 100, min_lr_rate=least)

    assert [warmup_cosine(t, 10, 100, least) for t in range(101)] == pytest.approx(factors(make, 101), abs=1e-12)


@pytest.mark.parametrize("least", [0.0, 0.1])
def test_warmup_stable_decay_is_transformers(least):
    def make(optimizer):
        return transformers.get_wsd_schedule(
            optimizer, num_warmup_steps=10, num_stable_steps=50, num_decay_steps=30, decay_type="linear",
            min_lr_ratio=least,
        )  # fmt: skip

    ours = [warmup_stable_decay(t, 10, 50, 30, least) for t in range(100)]
    assert ours == pytest.approx(factors(make, 100), abs=1e-12)
    assert ours[10:61] == [1.0] * 51 and ours[-1] == pytest.approx(least)


def test_adams_first_step_is_the_learning_rate_for_every_weight():
    """m̂ / √v̂ = g / |g| at t = 1, so the scale of the loss does not matter."""
    w = nn.Parameter(torch.zeros(3))
    w.grad = torch.tensor([1e-4, -1.0, 1e3])
    scratch.Adam([w], lr=0.5).step()
    assert w.tolist() == pytest.approx([-0.5, 0.5, -0.5], rel=1e-3)
    assert math.isclose(w.grad[2], 1e3), "gradients are read only"
