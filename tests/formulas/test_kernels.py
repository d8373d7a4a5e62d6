"""What a card's kernels take in a step, and where that is from."""

from dataclasses import replace

import pytest

import llmlab as lab
from benchmarks.time import training_rates as derivation
from llmlab import Training
from llmlab.archive import figure
from llmlab.formulas.time.elementwise import moved
from llmlab.formulas.time.kernels import kernels, training_rates
from llmlab.formulas.time.step import fastest_kernel, outside, passes
from llmlab.hardware.kernel_tables import kernel_table
from llmlab.hardware.links import cluster

SQUARE = (8192, 8192, 8192, "bf16")


def test_shares_are_those_of_the_tables_and_records():
    again, kept = derivation.shares(), training_rates()["share"]
    assert again == pytest.approx(kept, rel=0.005)
    assert derivation.measured_cards() == training_rates()["measured"]
    assert all(0 < share < 1 for share in derivation.product_shares().values())


def test_power_holds_back_what_multiplies_fastest():
    """No product passes the share of the peak that lasts; one that is slower anyway takes its measured time."""
    burst, lasting = kernel_table("H100-80GB").matmul, training_rates()["sustained"]["9.0"]
    limit = lasting * lab.gpu("H100").peak("bf16")
    square, narrow = SQUARE, (64, 8192, 8192, "bf16")
    assert 2 * 8192**3 / burst(*square).seconds > 1.05 * limit
    assert 2 * 8192**3 / kernels("H100").matmul(*square) == pytest.approx(limit)
    assert kernels("H100").matmul(*narrow) == pytest.approx(burst(*narrow).seconds)
    assert all(0.4 < share < 1 for share in training_rates()["sustained"].values())
    assert 0.7 < kernels("H100").clocks < kernels("A100").clocks < 1


def test_power_does_not_hold_back_attention_that_waits_for_exponentials():
    for card in ("B200", "GB300"):
        found = kernels(card)
        assert found.attention(8, 32, 4096, 128, "cudnn", "bf16") == found.table.attention(8, 32, 4096, 128).seconds


def test_cards_of_another_chip_have_another_limit():
    """A GeForce's peak is half that of its units, an H20's a sixth of its chip's: they reach it, as was measured."""
    for card in ("RTX-3090", "RTX-4090", "H20"):
        found = kernels(card)
        assert found.sustained == 1 and 2 * 8192**3 / found.matmul(*SQUARE) == pytest.approx(found.reached, rel=0.005)


def test_grids_are_transferred_from_the_most_similar_gpu_that_was_measured():
    """Of the same compute capability if there is one, and of the nearest bandwidth among several."""
    measured = [lab.gpu(name) for name in training_rates()["measured"]]
    for card in lab.gpus():
        base = kernels(card).base
        if alike := [gpu for gpu in measured if gpu.compute_capability == card.compute_capability]:
            nearest = min(abs(gpu.bandwidth - card.bandwidth) for gpu in alike)
            assert base.name == card.name or (base in alike and abs(base.bandwidth - card.bandwidth) == nearest)
        assert base == card or kernels(card).kind == "transferred"


def test_a_transferred_product_is_scaled_by_what_binds_it():
    """By FLOP: the RTX 4090 reaches 165 TFLOP/s (measured_rates.toml). By bytes: an H20 reads as fast as its
    bandwidth."""
    assert 2 * 8192**3 / kernels("RTX-4090").matmul(*SQUARE) == pytest.approx(164.81e12, rel=0.005)
    few_rows = (1, 16384, 16384, "bf16")
    h20, base = kernels("H20"), kernels("H100")
    ratio = h20.matmul(*few_rows) / base.matmul(*few_rows)
    assert ratio == pytest.approx(base.gpu.bandwidth / h20.gpu.bandwidth, rel=0.01)


def test_no_card_multiplies_faster_than_its_large_products():
    """An L40S's rates fall as matrices grow, by its power limit; an RTX 4090's, an L4's and an H20's do not. In fp8
    they reach the same share of the peak. Cards that were measured are as fast as they were."""
    for card in ("RTX-4090", "RTX-4060-Ti", "L4", "H20", "A10", "MI300X"):
        found = kernels(card)
        for m, n, k in ((2048, 2048, 2048), (8192, 4096, 4096), (16384, 4096, 11008)):
            for dtype in ("bf16", "fp8"):
                if seconds := found.matmul(m, n, k, dtype):
                    share = found.reached / found.gpu.peak("bf16")
                    assert 2 * m * n * k / seconds <= 1.001 * share * found.gpu.peak(dtype), (card, m, dtype)
    own = kernels("L40S")
    assert own.reached is None and own.matmul(2048, 2048, 2048, "bf16") < 0.9 * own.matmul(*SQUARE) / 64


def test_under_a_power_limit_what_computes_is_slower_and_what_moves_is_not():
    """Whether its kernels were measured, transferred, fitted or published; the interval is that of a transfer."""
    for name, watts in (("H100", 500), ("L40S", 250), ("RTX-4090", 300), ("T4", 50), ("MI300X", 500)):
        whole, found = kernels(name), kernels(lab.gpu(name, power=watts))
        share, dtype = (watts / whole.gpu.power) ** (1 / 3), "fp16"
        product, limited = (each.matmul(8192, 8192, 8192, dtype) for each in (whole, found))
        assert product / limited == pytest.approx(share, rel=0.001)
        attention, limited = (each.attention(8, 32, 4096, 128, "flash", dtype) for each in (whole, found))
        assert attention / limited == pytest.approx(share, rel=0.001)
        assert kernels(lab.gpu(name, power=whole.gpu.power)).matmul(*SQUARE[:3], dtype) == product  # its own limit
        assert found.bandwidth == whole.bandwidth and found.spread >= whole.spread
        assert f"at {watts} of {whole.gpu.power:g} W" in found.sources["products"] and " W" not in whole.origin
    one = (1, 16384, 16384, "bf16")  # bound by bytes
    assert kernels(lab.gpu("H100", power=500)).matmul(*one) == pytest.approx(kernels("H100").matmul(*one))
    assert kernels(lab.gpu("H100", power=500)).spread == training_rates()["spread"]["transferred"]


@pytest.mark.parametrize("card", ["A100-80GB", "H100-80GB"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_flash_attention_2_takes_what_its_author_measured(card, head_size):
    """16,384 tokens of 2,048 / head_size heads, forward and backward: the figure's TFLOP/s, of which power
    takes a few percent from an A100's fastest in steps that last."""
    found = kernels(card)
    published = figure(derivation.FLASH_STEPS["8.0" if card[0] == "A" else "9.0"][head_size])
    for name, length in derivation.LENGTHS.items():
        batch, heads = 16384 // length, 2048 // head_size
        flop = 3.5 * 2 * batch * heads * length**2 * head_size
        forward = found.attention(batch, heads, length, head_size, "flash", "bf16")
        rate = flop / (forward * (1 + found.backward("flash")))
        assert rate == pytest.approx(published[f"FlashAttention-2, {name}"], rel=0.01 if card[0] == "H" else 0.04)


def test_attention_between_and_beyond_the_authors_lengths():
    """The share of the measured time is between its neighbours', and that of the ends beyond them; chips without the
    author's rates have their own."""
    slower = kernels("H100").slower
    assert slower("flash", 2048, 128) < slower("flash", 3000, 128) < slower("flash", 4096, 128)
    assert slower("flash", 65536, 128) == slower("flash", 16384, 128)
    assert slower("flash", 64, 64) == slower("flash", 512, 64)
    assert kernels("L40S").slower("flash", 4096, 128) == kernels("T4").slower("flash", 4096, 128) == 1


def test_collectives_are_measured_where_ranks_are_joined_as_they_were():
    size = 2**28
    own = kernel_table("A100-80GB").collective("all-gather", size, 8).seconds
    node = cluster("A100")
    assert kernels("A100-40GB").collective("all-gather", size, node.group(8)) == own
    by_links = kernels("A800").collective("all-gather", size, cluster("A800").group(8))  # with 8 of 12 links
    assert by_links > 1.2 * own
    assert kernels("A100").collective("all-gather", size, node.group(16)) > 1.1 * own
    slower = cluster("A100", reached=0.5 * node.inside.reached).group(8)  # a rate of one's own
    assert kernels("A100").collective("all-gather", size, slower) > 1.5 * own


def test_rows_that_are_not_whole_16_bytes_take_longer():
    """GPT-2's head has 50,257 rows; padded to 50,304, compiled, or Megatron-LM's, it is like what was measured."""
    run, spec = Training(micro_batch=8, seq_len=1024, precision="autocast-bf16"), lab.model("gpt2")
    odd, found = outside(spec, run, kernels("A100")), kernels("A100")
    three = [found.matmul(*s, "bf16") for s in ((8192, 50257, 768), (8192, 768, 50257), (50257, 768, 8192))]
    assert odd.misaligned_s == pytest.approx(3 * sum(three)) == 1.5 * odd.maybe_less_s
    assert odd.extrapolated_s == 0 == odd.maybe_more_s
    sizes = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50304}
    report, padded = (lab.estimate(each, run, "A100") for each in (spec, sizes))
    assert "which take 3 times as long" in report.time_sources["products"]
    assert "times as long" not in padded.time_sources["products"]
    assert report.step_seconds - padded.step_seconds == pytest.approx(odd.maybe_less_s, rel=0.05)
    lows = report.step_seconds_low / report.step_seconds, padded.step_seconds_low / padded.step_seconds
    assert lows[1] - lows[0] == pytest.approx(odd.maybe_less_s / report.step_seconds, rel=0.01)
    assert outside(spec, replace(run, compile=True), found).misaligned_s == 0
    assert outside(spec, replace(run, precision="fp32"), found).misaligned_s == 0
    assert outside(spec, replace(run, precision="autocast-fp16"), kernels("T4")).misaligned_s == 0  # fitted
    megatron = replace(run, precision="mixed-bf16", stack="megatron")
    assert outside(spec, megatron, found).misaligned_s == 0
    half = lab.LoRA(rank=4, targets=("c_attn",), autocast_adapter_dtype=False)
    narrow = replace(run, precision="bf16", lora=half)  # its head is frozen: two products of three
    assert outside(spec, narrow, found).misaligned_s == pytest.approx(3 * (three[0] + three[1]))


def test_a_product_takes_as_long_as_its_transpose_in_bf16_and_no_longer_for_its_casts_in_fp8():
    """What was measured of fp8 casts the first matrix, which elementwise operators count: off, a product takes as long
    from either side, as in bf16; where only one side was measured it stands for both."""
    own, table = kernels("H100"), kernel_table("H100-80GB")
    tall, wide = (32768, 256, 8192), (256, 32768, 8192)
    assert table.matmul(*tall, "fp8").seconds > 4 * table.matmul(*wide, "fp8").seconds
    assert own.matmul(*tall, "fp8") == pytest.approx(own.matmul(*wide, "fp8"), rel=0.35)
    assert own.matmul(*SQUARE[:3], "fp8") < 0.65 * own.matmul(*SQUARE)
    beyond = (65536, 1024, 4096)
    for name, dtype in (("H100-80GB", "bf16"), ("H100-80GB", "fp16"), ("A100-80GB", "bf16")):
        found = kernel_table(name).matmul(*beyond, dtype)
        assert found.inside and found.seconds == kernel_table(name).matmul(1024, 65536, 4096, dtype).seconds
    assert not table.matmul(*beyond, "fp8").inside


def test_attention_on_a_mi300x_is_sdpa_or_the_faster_composable_kernel():
    """SDPA's backward pass is slow there. Transformer Engine and FlashAttention have Composable Kernel."""
    spec = lab.model("meta-llama/Llama-3.1-8B")
    rates, run = kernels("MI300X"), Training(micro_batch=1, seq_len=8192, dp=8, precision="mixed-bf16", compile=True)
    sdpa, ck = (rates.attention(1, 32, 8192, 128, name, "bf16") for name in ("flash", "ck"))
    assert 1.3 < sdpa / ck < 2 and rates.backward("flash") > rates.backward("ck") > kernels("H100").backward("flash")
    assert 2 * rates.attention(1, 32, 8192, 64, "flash", "bf16") > 1.5 * sdpa  # narrow heads are slower
    megatron = replace(run, compile=False, stack="megatron")
    titan = replace(run, attention="flash", stack="torchtitan")  # FlashAttention of SDPA
    runs = run, titan, replace(run, attention="flash"), megatron
    assert [fastest_kernel(spec, each, "flash", rates.gpu) for each in runs] == ["flash", "flash", "ck", "ck"]
    assert fastest_kernel(spec, megatron, "flash", lab.gpu("H100")) == "cudnn"
    assert kernels("MI355X").attention(1, 32, 8192, 128, "flash", "bf16") < 0.5 * sdpa


def test_eager_operators_take_what_an_h200s_profile_has():
    """Of Llama-3.2-1B, 4 × 2,048 tokens in bf16, they took 61.4 ms beside products, attention and update (torch 2.11,
    2026-11-26); their bytes alone would take 53."""
    spec, card = lab.model("Llama-3.2-1B"), lab.gpu("H200")
    run = Training(micro_batch=4, seq_len=2048, precision="bf16")
    found = passes(spec, run, card)
    assert found.elementwise + found.loss == pytest.approx(0.0614, rel=0.05)
    assert sum(moved(spec, run, card)[:2]) / kernels(card).bandwidth < 0.9 * 0.0614
