"""NF4 byte for byte as bitsandbytes has it: the code book, the codes, absmax, double quantization."""

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llmlab.base.errors import SpecError
from llmlab.course.quantize.formats import nf4

EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -1e-30, 3e38, 1e-44]


def midpoints():
    book = nf4.code_book()
    return ((book[:-1] + book[1:]) / 2).tolist()


blocks = arrays(
    np.float32, (4, 64), elements=st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(EDGES),
    fill=st.just(np.float32(0)),
)  # fmt: skip


def check(x, block=64):
    theirs, state = bnb.quantize_4bit(x, blocksize=block, quant_type="nf4")
    codes, absmax = nf4.encode(x, block)
    assert torch.equal(codes, theirs.reshape(-1)) and torch.equal(absmax, state.absmax)
    decoded = nf4.decode(codes, absmax, x.shape, block)
    assert torch.equal(decoded.to(x.dtype), bnb.dequantize_4bit(theirs, state).reshape(x.shape))


def test_the_code_book_follows_from_the_normal_distribution():
    book = nf4.code_book()
    assert torch.equal(book, bnb.get_4bit_type("nf4", device="cpu"))
    assert book[0] == -1 and book[7] == 0 and book[-1] == 1 and (book.diff() > 0).all()
    draws = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) / 1.8482  # the tail's quantile, as absmax
    used = nf4.nearest(draws, book).bincount(minlength=16) / len(draws)
    assert used.min() > 0.03 and used.max() < 0.09, "equally likely values: about 1/16 each"


def test_the_dynamic_code_book_is_bitsandbytes_own():
    assert torch.equal(nf4.dynamic_code_book(), bnb.create_dynamic_map())


@given(x=blocks)
def test_codes_and_absmax_are_bitsandbytes_own(x):
    check(torch.from_numpy(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [64, 128, 1024])
def test_in_every_dtype_and_block_size(dtype, block):  # from 2048 on bitsandbytes compiles its decoder: slow
    x = torch.randn(16, 4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(x, block)


def test_ties_go_to_the_lower_code_as_there():
    ties = torch.tensor([*midpoints(), 1.0, *[float(np.nextafter(np.float32(m), np.float32(1))) for m in midpoints()]])
    x = torch.nn.functional.pad(ties, (0, 64 - len(ties)))
    check(x)
    codes, _ = nf4.encode(x)
    assert codes[0] >> 4 == 0 and codes[0] & 15 == 1, "the first two midpoints"


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 600), flat=st.booleans())
def test_double_quantization_is_bitsandbytes_own(seed, rows, flat):
    rng = np.random.default_rng(seed)
    spread = 1.0 if flat else 10.0 ** rng.uniform(-4, 2, (rows, 1))
    x = torch.from_numpy((spread * (rng.standard_normal((rows, 64)) if not flat else np.ones((rows, 64)))).astype("f4"))
    _, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
    codes, absmax = nf4.encode(x)
    nested, outer, offset = nf4.double_encode(absmax)
    assert torch.equal(nested, state.absmax) and torch.equal(outer, state.state2.absmax)
    assert torch.equal(offset, state.offset)
    restored = nf4.double_decode(nested, outer, offset)
    assert torch.equal(restored, bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset)
    assert torch.equal(nf4.decode(codes, restored, x.shape), bnb.dequantize_4bit(_, state).reshape(x.shape))


def test_double_quantization_of_many_absmax_too():
    """A CPU looks its codes up on a grid of 2^16 values: one in 600 is not the nearest, and is the same one here."""
    absmax = torch.rand(300_000, generator=torch.Generator().manual_seed(0)) ** 3
    nested, outer, offset = nf4.double_encode(absmax)
    theirs, state = bnb.quantize_blockwise(absmax - absmax.mean(), blocksize=256)
    assert torch.equal(nested, theirs) and torch.equal(outer, state.absmax) and torch.equal(offset, absmax.mean())
    centred = (absmax - offset) / outer.repeat_interleave(256)[: len(absmax)]
    nearest = nf4.nearest(centred, nf4.dynamic_code_book())
    assert 0 < (nearest != nested).float().mean() < 0.01


def test_numpy_in_numpy_out_and_the_input_is_left_alone():
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float16)
    before = x.copy()
    codes, absmax = nf4.encode(x)
    assert codes.dtype == np.uint8 and absmax.dtype == np.float32 and codes.shape == (256,) and absmax.shape == (8,)
    restored = nf4.decode(codes, absmax, x.shape)
    assert isinstance(restored, np.ndarray) and restored.dtype == np.float32
    np.testing.assert_array_equal(x, before)
    nested, outer, offset = nf4.double_encode(absmax)
    np.testing.assert_allclose(nf4.double_decode(nested, outer, offset), absmax, rtol=0.02)


def test_zeros_stay_exactly_zero():
    x = torch.zeros(2, 64)
    x[1, 3] = 2.0
    assert torch.equal(nf4.decode(*nf4.encode(x), x.shape), x)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(3, 33), r"99 weights \(shape \(3, 33\)\)"),
        (torch.zeros(0, 64), "holds no row"),
        (torch.zeros(64, dtype=torch.int8), "int8"),
        (torch.full((1, 64), float("nan")), "64 nan"),
        (torch.tensor([[1.0] * 63 + [float("inf")]]), r"1 inf, the first at \(0, 63\)"),
    ],
)
def test_bad_weights_are_refused(x, says):
    with pytest.raises(SpecError, match=says):
        nf4.encode(x)


@pytest.mark.parametrize("block", [0, -64, 63, 64.0, True])
def test_a_block_is_an_even_whole_number(block):
    with pytest.raises(SpecError, match="even whole number"):
        nf4.encode(torch.zeros(64), block)


def test_truncated_data_is_refused():
    codes, absmax = nf4.encode(torch.ones(4, 64))
    for broken in ((codes[:-1], absmax, (4, 64)), (codes, absmax[:-1], (4, 64)), (codes, absmax, (5, 64))):
        with pytest.raises(SpecError, match="truncated"):
            nf4.decode(*broken)
    with pytest.raises(SpecError, match="float32"):
        nf4.decode(codes, absmax.half(), (4, 64))
    with pytest.raises(SpecError, match="uint8"):
        nf4.decode(codes.int(), absmax, (4, 64))
    nested, outer, offset = nf4.double_encode(absmax)
    with pytest.raises(SpecError, match="outer absmax"):
        nf4.double_decode(nested, torch.cat([outer, outer]), offset)
