"""Number formats agree with torch's casts bit for bit, the loss scaler with torch's GradScaler step for step."""

import json
import math
import os
import shutil
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmlab.base.errors import SpecError
from llmlab.course.techniques.precision import (
    FORMATS,
    LossScaler,
    MasterWeights,
    stochastic_round,
)
from llmlab.notebook.precision_widget import EXAMPLES, FloatWidget, fields

DTYPES = {
    "fp16": (torch.float16, torch.uint16),
    "bf16": (torch.bfloat16, torch.uint16),
    "fp8-e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8-e5m2": (torch.float8_e5m2, torch.uint8),
}
NARROW = tuple(DTYPES)
# Every finite fp32 number, and the halves between two numbers of a format, where rounding to even decides.
singles = st.floats(width=32, allow_nan=False)
ties = st.builds(
    lambda name, pattern, sign: sign * (FORMATS[name].decode(pattern) + FORMATS[name].decode(pattern + 1)) / 2,
    st.sampled_from(("fp16", "bf16")), st.integers(0, 0x7BFE), st.sampled_from((-1, 1)),
)  # fmt: skip


def same(one: float, other: float) -> bool:
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or (one == other and math.copysign(1, one) == math.copysign(1, other))


# ---- formats


@pytest.mark.parametrize("name", NARROW)
def test_every_pattern_decodes_as_torch_reads_it_and_encodes_back(name):
    f, (dtype, raw) = FORMATS[name], DTYPES[name]
    patterns = range(1 << f.bits)
    read = torch.arange(1 << f.bits).to(raw).view(dtype).float().tolist()
    assert [p for p in patterns if not same(f.decode(p), read[p])] == []
    assert [p for p in patterns if not math.isnan(read[p]) and f.encode(read[p]) != p] == []
    assert math.isnan(f.decode(f.encode(math.nan)))


@pytest.mark.parametrize("name", NARROW)
@settings(max_examples=400, deadline=None)
@given(value=singles | ties)
@example(value=65519.996)  # the last number that fp16 rounds down, and the first that it does not
@example(value=65520.0)
@example(value=2.0**-25)
@example(value=61440.0)
@example(value=-0.0)
def test_fp32_rounds_as_torch_casts(name, value):
    f, (dtype, raw) = FORMATS[name], DTYPES[name]
    cast = torch.tensor(value, dtype=torch.float32).to(dtype)
    if name == "fp8-e4m3" and abs(value) > f.largest:
        # older torch gave NaN, the specification's other mode; torch 2.13 clamps
        assert f.round(value) == math.copysign(448, value)
        assert cast.isnan() or cast.float().item() == f.round(value)
    else:
        assert f.encode(value) == cast.view(raw).item()


@settings(max_examples=400, deadline=None)
@given(value=st.floats(allow_nan=False))
def test_fp32_rounds_as_the_processor_does(value):
    pattern = FORMATS["fp32"].encode(value)
    assert pattern == torch.tensor(value, dtype=torch.float64).float().view(torch.int32).item() % (1 << 32)
    assert same(FORMATS["fp32"].decode(pattern), struct.unpack("<f", struct.pack("<I", pattern))[0])


@given(value=st.floats(min_value=2.0**-14, max_value=65000.0, width=32), power=st.integers(-100, 100))
def test_tf32_has_fp16s_mantissa_and_fp32s_range(value, power):
    tf32 = FORMATS["tf32"]
    assert tf32.round(value) == FORMATS["fp16"].round(value)
    assert tf32.round(value * 2.0**power) == tf32.round(value) * 2.0**power


def test_limits_are_those_torch_states():
    for name, (dtype, _) in DTYPES.items():
        f, stated = FORMATS[name], torch.finfo(dtype)
        assert (f.largest, f.smallest_normal, f.spacing(1.0)) == (stated.max, stated.tiny, stated.eps)
        assert f.round(f.smallest / 2) == 0 < f.round(f.smallest * 0.51)
    assert (FORMATS["fp16"].largest, FORMATS["fp16"].smallest) == (65504, 2.0**-24)
    assert (FORMATS["tf32"].bits, FORMATS["fp8-e4m3"].bits) == (19, 8)


def test_errors_name_what_is_allowed():
    with pytest.raises(SpecError, match="pattern=65536 is not a pattern of fp16; give 0 to 65535"):
        FORMATS["fp16"].decode(65536)


# ---- stochastic rounding


@settings(max_examples=60, deadline=None)
@given(value=st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100))
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(value):
    draws = stochastic_round(torch.full((4096,), value), torch.Generator().manual_seed(0)).float()
    low, high = draws.min().item(), draws.max().item()
    f = FORMATS["bf16"]
    step = f.spacing(value)
    assert low <= value <= high <= low + step
    assert same(f.round(low), low) and same(f.round(high), high)
    assert abs(draws.double().mean().item() - value) <= 0.04 * step  # five standard errors of 4096 draws
    if f.round(value) == value:
        assert low == high == value


def test_stochastic_rounding_leaves_what_is_not_finite():
    rounded = stochastic_round(torch.tensor([math.inf, -math.inf, math.nan]))
    assert rounded.tolist()[:2] == [math.inf, -math.inf] and rounded[2].isnan()
    with pytest.raises(SpecError, match=r"torch.float64; give torch.float32"):
        stochastic_round(torch.zeros(1, dtype=torch.float64))


def test_what_rounding_to_nearest_loses_stochastic_rounding_and_master_weights_keep():
    generator = torch.Generator().manual_seed(0)
    nearest = torch.ones(256, dtype=torch.bfloat16)
    random = nearest.clone()
    weight = torch.nn.Parameter(nearest.clone())
    masters = MasterWeights([weight])
    for _ in range(100):
        nearest += 0.001  # a quarter of the way to the half between 1 and its neighbour, 1.0078
        random = stochastic_round(random.float() + 0.001, generator)
        masters.parameters[0].data += 0.001
        masters.give_weights()
    assert nearest.eq(1).all()
    assert random.float().mean().item() == pytest.approx(1.1, abs=0.01)
    assert weight.float().mean().item() == FORMATS["bf16"].round(1.1)


# ---- loss scaling


@settings(max_examples=40, deadline=None)
@given(
    growth=st.sampled_from((2.0, 1.7)),
    backoff=st.sampled_from((0.5, 0.3)),
    start=st.sampled_from((2.0**16, 3.0, 2.0**127)),
    interval=st.integers(1, 3),
    bad=st.lists(st.sampled_from((None, None, None, math.inf, math.nan)), min_size=1, max_size=10),
    unscaled_first=st.booleans(),
)
def test_the_loss_scaler_is_torchs_step_for_step(growth, backoff, start, interval, bad, unscaled_first):
    ours = LossScaler(start, growth, backoff, interval)
    theirs = torch.amp.GradScaler("cpu", start, growth, backoff, interval)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([w], lr=0.1) for w in weights]
    for poison in bad:
        x = torch.randn(8, generator=generator)
        for scaler, w, optimizer in zip((ours, theirs), weights, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale((w * x).square().sum()).backward()
            if poison is not None:
                w.grad[3] = poison
            if unscaled_first:
                (scaler.unscale if scaler is ours else scaler.unscale_)(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert torch.equal(weights[0], weights[1])
        assert ours.factor.item() == theirs.get_scale()
        assert ours.good_steps == theirs.state_dict()["_growth_tracker"]


def test_the_scale_never_grows_to_infinity():
    ours, theirs = LossScaler(2.0**127, interval=1), torch.amp.GradScaler("cpu", 2.0**127, growth_interval=1)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight])
    for _ in range(3):
        for scaler in (ours, theirs):
            optimizer.zero_grad()
            scaler.scale((weight * 1e-30).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert ours.factor.item() == theirs.get_scale() == 2.0**127


def test_the_loss_scaler_refuses_what_torchs_refuses():
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    optimizer = torch.optim.SGD([half])
    with pytest.raises(SpecError, match=r"gradients in torch.float16 would underflow again"):
        LossScaler().step(optimizer)
    with pytest.raises(ValueError, match="FP16 gradients"):
        theirs = torch.amp.GradScaler("cpu")
        theirs.scale(half.sum())
        theirs.unscale_(optimizer)
    scaler = LossScaler()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight])
    scaler.unscale(optimizer)
    with pytest.raises(SpecError, match="already called"):
        scaler.unscale(optimizer)


def test_fp16_adamw_divides_by_an_epsilon_that_is_zero():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.tensor([1e-5, 0.0], dtype=torch.float16)  # its square is below fp16's smallest number
    torch.optim.AdamW([weight], foreach=False).step()
    assert FORMATS["fp16"].round(1e-8) == 0
    assert weight[0].item() == -math.inf and weight[1].isnan()


# ---- looking at a step


def test_the_picture_without_scripts_holds_the_bits():
    widget = FloatWidget(-0.1)
    html = widget._repr_html_()
    for name, f in FORMATS.items():
        bits = "".join(fields(f, -0.1))
        assert int(bits, 2) == f.encode(-0.1) and len(bits) == f.bits
        assert " ".join(fields(f, -0.1)) in repr(widget)
        assert f"{name} keeps {f.round(-0.1)!r}" in html
    assert html.count('<span class="bit') == sum(f.bits for f in FORMATS.values()) + 3
    assert "http" not in html and "src=" not in html  # it brings all it needs
    assert 'class="controls" hidden' in html  # no control is shown that does nothing


@pytest.fixture(scope="module")
def chromium():
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        if os.environ.get("LLMLAB_REQUIRE_BROWSER"):
            pytest.fail("the picture's script was NOT run: no Chromium is installed")
        pytest.skip("the picture's script was NOT run: no Chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    page = chromium.new_page()
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.set_content(FloatWidget(0.1)._repr_html_())
    yield page
    page.close()
    assert page.problems == []


def shown(page) -> dict[str, int]:
    read = "rows => rows.map(r => [r.getAttribute('aria-label'), [...r.querySelectorAll('.bit')].map(b => b.textContent).join('')])"  # noqa: E501
    return {name: int(bits, 2) for name, bits in page.eval_on_selector_all(".format", read)}


def test_the_pictures_script_rounds_as_the_python_does(page):
    random = [FORMATS["fp32"].decode(pattern) for pattern in range(17, 1 << 32, 78_543_211)]
    edges = [0.0, -0.0, 65519.99, 65520.0, 2.0**-25, 2.0**-149, 1e-46, 1e300, 448.0, 464.5, 1.0009765625, math.inf]
    for value in [*edges, *map(float, EXAMPLES), *(each for each in random if not math.isnan(each))]:
        page.fill("input", json.dumps(value))
        assert shown(page) == {name: f.encode(value) for name, f in FORMATS.items()}, value


def test_the_picture_is_played_with_the_keyboard_alone(page):
    page.focus("input")
    for _ in EXAMPLES:
        page.keyboard.press("Tab")
    for _ in range(4):  # past fp32 and tf32, one stop each, to fp16's sign; then to its last bit
        page.keyboard.press("Tab")
    focused = "document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == "bf16 sign"
    page.keyboard.press("Enter")
    assert page.input_value("input") == str(-FORMATS["bf16"].round(0.1))
    assert shown(page)["fp16"] == FORMATS["fp16"].encode(-FORMATS["bf16"].round(0.1))
    page.keyboard.press("End")
    assert page.evaluate(focused) == "bf16 mantissa bit 0"
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"
    assert page.text_content("[role=status]").startswith("bf16 keeps -0.0996")
