"""What no format and no algorithm takes: refused in one line that says what is wrong, and the input is as it was."""

import pytest
import torch

from llmlab.base.errors import SpecError
from llmlab.course import quantize
from llmlab.course.quantize.algorithms import smoothquant
from llmlab.course.quantize.algorithms.hqq import hqq
from llmlab.course.quantize.algorithms.rtn import rtn
from llmlab.course.quantize.formats import affine, fp8, gguf, int8, kv, nf4

INPUTS = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))

# Each takes a weight of (8, 64), in groups or blocks of 32 or 64.
TAKERS = {
    "affine": lambda w: affine.quantize(w, 4, "group", 32),
    "affine, best clip": lambda w: affine.quantize(w, 4, "group", 32, clip="mse"),
    "rtn": lambda w: rtn(w, 4, 32),
    "gptq": lambda w: quantize.gptq(w, INPUTS, 4, 32),
    "awq": lambda w: quantize.awq(w, INPUTS, 4, 32),
    "hqq": lambda w: hqq(w, 4, 32),
    "smoothquant": lambda w: smoothquant.smoothquant(w, INPUTS),
    "int8 rows": int8.quantize_rows,
    "nf4": nf4.encode,
    "fp8": lambda w: fp8.quantize(w, "e4m3", (8, 64)),
    "gguf Q8_0": lambda w: gguf.encode("Q8_0", w),
    "gguf Q4_0": lambda w: gguf.encode("Q4_0", w),
    "gguf MXFP4": lambda w: gguf.encode("MXFP4", w),
}
HAVE_NO_GROUPS = ("int8 rows", "smoothquant")


def weight():
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 0.1


def refused_unchanged(take, broken, says):
    before = broken.clone()
    with pytest.raises(SpecError, match=says) as refusal:
        take(broken)
    assert "\n" not in str(refusal.value)
    assert torch.equal(broken.nan_to_num(7.0), before.nan_to_num(7.0)) and broken.dtype == before.dtype


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(name, value):
    broken = weight()
    broken[3, 5] = value
    refused_unchanged(TAKERS[name], broken, r"first at \(3, 5\)")


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_no_floats(name, dtype):
    refused_unchanged(TAKERS[name], weight().to(dtype), str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("name", [name for name in TAKERS if name not in HAVE_NO_GROUPS])
def test_shapes_that_the_group_does_not_divide(name):
    refused_unchanged(TAKERS[name], weight()[:, :61].contiguous(), "divide|whole number|not cover|of 64 features")


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zeros_become_zeros_in_every_dtype(name, dtype):
    zeros = torch.zeros(8, 64, dtype=dtype)
    found = TAKERS[name](zeros)
    assert not zeros.any() and zeros.dtype == dtype
    if name == "nf4":
        restored = nf4.decode(*found, (8, 64))
    elif name == "int8 rows":
        restored = found[0].float() * found[1][:, None]
    elif isinstance(found, bytes):
        restored = torch.from_numpy(gguf.decode(name.split()[1], found, (8, 64)))
    else:
        restored = found.dequantize()
    assert not restored.any() and torch.isfinite(restored).all()


@pytest.mark.parametrize("name", TAKERS)
def test_good_weights_are_left_as_they_were(name):
    good, inputs = weight(), INPUTS.clone()
    TAKERS[name](good)
    assert torch.equal(good, weight()) and torch.equal(inputs, INPUTS)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: hqq(weight(), 4, 48), "group=48 does not divide 64"),
        (lambda: hqq(weight(), 2.5, 32), "bits=2.5"),
        (lambda: kv.rounded(torch.full((1, 1, 32, 8), float("nan")), "channel"), "256 nan"),
        (lambda: kv.rounded(torch.zeros(1, 1, 4, 30), "token"), "group=32 does not divide 30"),
    ],
)
def test_other_settings_that_cannot_be(call, says):
    with pytest.raises(SpecError, match=says):
        call()
