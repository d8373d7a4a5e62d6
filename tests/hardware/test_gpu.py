"""The GPU table: what must hold of its figures, and the names it answers to."""

import re
import subprocess
import sys
from dataclasses import fields
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlab.base.errors import NotAvailable, SpecError, UnknownName
from llmlab.base.units import GiB, MiB
from llmlab.formulas.report import estimated
from llmlab.formulas.time.kernels import kernels
from llmlab.hardware.gpu import DTYPES, GPU, OTHER_BACKENDS, PRICES, _plain, assumed_memory, clocks, gpu, gpus, match
from llmlab.hardware.tables import read_table
from llmlab.specs.run import Training

CARDS = pytest.mark.parametrize("card", gpus(), ids=lambda card: card.name)

# ---- provenance


@CARDS
def test_every_figure_has_a_source_and_every_source_a_figure(card):
    words = {"name", "vendor", "architecture", "aliases", "sources", "checked", "prices"}
    figures = {f.name for f in fields(GPU)} - words
    given_figures = {name for name in figures if getattr(card, name) is not None}
    if card.node_gpus == 8:  # of any GPU that nothing else is said of
        given_figures.remove("node_gpus")
    if card.peer_access:
        given_figures.remove("peer_access")
    assert set(card.sources) == given_figures
    assert all("http" in text or len(text) > 20 for text in card.sources.values())
    assert not any("[" in text for text in card.sources.values()), "a document's name was not replaced by the document"


@CARDS
def test_each_price_has_its_kind_its_date_and_its_source(card):
    for price in card.prices:
        assert price.kind in PRICES and price.usd > 0 and len(price.source) > 20
        assert price.date is None or date(2020, 1, 1) <= date.fromisoformat(price.date) <= date.today()
        # An hour costs less than a hundredth of the GPU, a GPU no less than 100 dollars.
        assert (price.usd > 100) == (price.kind == "purchase")
    hourly = [price.usd for price in card.prices if price.kind != "purchase"]
    assert card.usd_per_hour == (hourly[0] if hourly else None)


def test_prices_are_of_cards_in_the_table():
    named = {name for entry in read_table("prices.toml")["list"] for name in entry["usd"]}
    assert named <= {card.name for card in gpus()}
    kinds = {price.kind for price in gpu("H100").prices}
    assert kinds == {"serverless", "rental", "purchase"} and gpu("H20").prices == ()


# ---- physics and the chips


@CARDS
def test_rates_are_of_known_dtypes_and_ordered_by_width(card):
    peaks = card.peak_flops
    assert set(peaks) <= set(DTYPES)
    assert all(rate > 0 for rate in peaks.values())
    order = [peaks[dtype] for dtype in ("fp32", "tf32", "fp16", "fp8", "fp4") if dtype in peaks]
    assert order == sorted(order), "narrower is never slower"
    if "int8" in peaks:
        assert peaks["int8"] >= 1.9 * peaks["fp16"]


@CARDS
def test_bf16_runs_at_the_rate_of_fp16_where_the_chip_has_it(card):
    assert card.peak("bf16") in (None, card.peak("fp16"))


@CARDS
def test_dtypes_follow_the_generation(card):
    if card.vendor != "NVIDIA":
        return
    assert card.supports_bf16 == (card.compute_capability >= (8, 0))
    assert ("tf32" in card.peak_flops) == (card.compute_capability >= (8, 0))
    assert ("fp8" in card.peak_flops) == (card.compute_capability >= (8, 9))
    blackwell_ultra = card.compute_capability == (10, 3)  # its int8 units are nearly gone
    assert ("int8" in card.peak_flops) == (card.compute_capability >= (7, 5) and not blackwell_ultra)
    assert ("fp4" in card.peak_flops) == (card.compute_capability >= (10, 0))


@CARDS
def test_fp32_is_what_the_cores_can_do(card):
    """FP32 rate = SMs × lanes × 2 × clock, for a boost clock between 1.3 and 2.7 GHz."""
    lanes = {"Volta": 64, "Turing": 64}.get(card.architecture, 128)
    if card.compute_capability in ((6, 0), (8, 0)):
        lanes = 64
    clock = card.peak("fp32") / (card.sms * lanes * 2)
    assert 1.3e9 < clock < 2.7e9


@CARDS
def test_memory_is_below_the_sticker_and_not_by_much(card):
    if sized := re.search(r"(\d+)GB", card.name):
        assert 0.9 * int(sized[1]) * GiB < card.memory < int(sized[1]) * GiB


@CARDS
def test_bandwidth_and_links_are_of_the_right_order(card):
    """Device memory is faster than NVLink, which is faster than PCIe; a swap of units or of directions breaks it."""
    assert 200e9 < card.bandwidth <= 8e12
    assert card.nvlink is None or card.nvlink < card.bandwidth / 2
    assert card.pcie is None or 15e9 < card.pcie < 64e9
    assert card.pcie is None or card.nvlink is None or card.nvlink > card.pcie


@CARDS
def test_the_machine_balance_lies_where_machines_do(card):
    """fp16 FLOPs per byte of memory: why decoding is bound by bytes. T4 203, A100-80GB 153, H100 295."""
    if card.compute_capability and card.compute_capability < (7, 0):
        return  # no matrix units
    least = 35 if card.name == "H20" else 70  # sold with a seventh of the H100's matrix units, and more bandwidth
    assert least < card.peak("fp16") / card.bandwidth < 450


def test_the_export_versions_differ_from_their_models_in_nvlink_alone():
    for cut, full in (("A800", "A100"), ("H800", "H100")):
        assert gpu(cut).nvlink < gpu(full).nvlink
        assert gpu(cut).nvlink == pytest.approx(200e9)
        assert (gpu(cut).peak_flops, gpu(cut).bandwidth) == (gpu(full).peak_flops, gpu(full).bandwidth)


# ---- names


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("t4", "T4"), ("Tesla T4", "T4"), ("v100", "V100-16GB"), ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("a100", "A100-80GB"), ("A100 80GB", "A100-80GB"), ("a100_40gb", "A100-40GB"), ("A100-40G B", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"), ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"), ("h100", "H100-80GB"), ("H100 80GB", "H100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"), ("NVIDIA H100 PCIe", "H100-80GB-PCIe"), ("NVIDIA H800", "H800-80GB"),
        ("NVIDIA H200", "H200"), ("H200-141GB", "H200"), ("NVIDIA B200", "B200"), ("rtx 4090", "RTX-4090"),
        ("4090", "RTX-4090"), ("NVIDIA GeForce RTX 4090", "RTX-4090"), ("GeForce RTX 3090", "RTX-3090"),
        ("RTX 4060 Ti", "RTX-4060-Ti"), ("4060ti", "RTX-4060-Ti"), ("NVIDIA L4", "L4"), ("NVIDIA A10G", "A10G"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)  # fmt: skip
def test_names_people_type_and_torch_prints(typed, meant):
    assert gpu(typed).name == meant


@given(st.sampled_from(gpus()), st.lists(st.booleans(), min_size=40, max_size=40), st.sampled_from(["-", " ", "_", ""]))
def test_case_and_separators_do_not_matter(card, upper, separator):
    typed = "".join(c.upper() if up else c.lower() for c, up in zip(card.name, upper, strict=False))
    assert gpu(typed.replace("-", separator)) is card


def test_a_card_passes_through():
    mine = GPU("mine", "NVIDIA", "Ampere", 1, 1.0, {}, 1)
    assert gpu(mine) is mine


@pytest.mark.parametrize(
    "other",
    ["NVIDIA H200 NVL", "RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "Tesla V100-PCIE-32GB", "NVIDIA A2",
     "B100", "NVIDIA H800 PCIe", "NVIDIA GeForce RTX 4080 Laptop GPU", "RTX 3050", "", "gpu"],
)  # fmt: skip
def test_a_similar_card_is_unknown_rather_than_somebody_elses_figures(other):
    with pytest.raises(UnknownName):
        gpu(other)


def test_an_unknown_name_names_the_nearest_and_what_to_do():
    with pytest.raises(LookupError, match=r"unknown GPU 'H10'.*H100.*`llmlab gpus`") as error:
        gpu("H10")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["8xA100", "8 x A100-80GB", "A100 x8", "A100x8"])
def test_several_gpus_are_not_one(name):
    with pytest.raises(SpecError, match=r"8 GPUs.*A100.*dp"):
        gpu(name)


def test_a_memory_may_be_that_of_several_gpus_and_not_zero():
    with pytest.raises(SpecError, match=r"means 2 GPUs.*'24GB'"):
        gpu("2x24GB")
    with pytest.raises(UnknownName):
        gpu("0GB")


def test_clocks_go_as_the_cube_root_of_a_power_limit():
    """Measured: A100s of 250 and 300 W beside one of 400 (measured_rates.toml). Memory is as fast as ever."""
    whole, limited = gpu("A100"), gpu("A100", power=250)
    assert (limited.name, limited.power, limited.bandwidth) == (whole.name, 250, whole.bandwidth)
    assert limited.peak("bf16") / whole.peak("bf16") == pytest.approx(0.855, abs=0.001)
    assert clocks(limited) == pytest.approx(0.855, abs=0.001) and clocks(whole) == 1 == clocks(gpu("A100", power=400))
    assert clocks(GPU("mine", "NVIDIA", "Ampere", 1, 1.0, {}, 1)) == 1  # in no table
    measured = read_table("measured_rates.toml")
    for watts, reached in ((250, measured["zzc0721"]["A100-40GB-PCIe"]), (300, measured["chsasank"]["A100-80GB-PCIe"])):
        said = clocks(gpu("A100", power=watts)) * measured["zzc0721"]["A100-80GB"]
        assert reached == pytest.approx(said, rel=0.1)


def test_a_power_limit_is_between_half_of_the_cards_own_and_that():
    for watts in (340, 701):
        with pytest.raises(SpecError, match=rf"power={watts} W for H100-80GB: give 350 to 700 W"):
            gpu("H100", power=watts)
    with pytest.raises(NotAvailable, match="power=200 W: the power limit of GB200 is unknown"):
        gpu("GB200", power=200)  # its CPUs take a part


def test_a_number_is_no_card():
    with pytest.raises(SpecError, match="4090 is a int"):
        gpu(4090)


def test_no_two_cards_answer_to_one_name():
    names = {}
    for card in gpus():
        for called in (card.name, *card.aliases):
            assert gpu(called) is card, f"{called} is {names.get(called)} already"
            names[called] = card.name


def test_peak_refuses_a_dtype_that_is_none():
    with pytest.raises(SpecError, match="dtype 'fp17' is not one of fp32"):
        gpu("T4").peak("fp17")


# ---- the GPU a driver shows


def test_match_tells_cards_of_one_name_apart_by_memory():
    """NVIDIA sells an RTX 3060 with 8 GB and a 4060 Ti with 8 GB under the names of the larger ones."""
    assert match("NVIDIA GeForce RTX 3060", 12_044 * MiB) is gpu("RTX-3060")
    assert match("NVIDIA GeForce RTX 3060", 7_970 * MiB) is None
    assert match("NVIDIA GeForce RTX 4060 Ti", 16_076 * MiB) is gpu("RTX-4060-Ti")
    assert match("NVIDIA GeForce RTX 4060 Ti", 7_940 * MiB) is gpu("RTX-4060-Ti-8GB")


def test_match_does_not_know_other_cards():
    assert match("NVIDIA L20", 45_000 * MiB) is None
    assert match("NVIDIA GH200 144G HBM3e", 146_000 * MiB) is None


def test_the_table_needs_no_torch():
    code = "import sys; from llmlab.hardware import gpu; gpu('T4'); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("name", "taken", "others"), [
    ("A100", "A100-80GB", {"A100-40GB"}), ("NVIDIA A100-SXM4", "A100-80GB", {"A100-40GB"}),
    ("a100 pcie", "A100-80GB-PCIe", {"A100-40GB-PCIe"}), ("V100", "V100-16GB", {"V100-32GB"}),
    ("H100", "H100-80GB", {"H100-94GB", "H100-96GB"}), ("rtx 4060 ti", "RTX-4060-Ti", {"RTX-4060-Ti-8GB"}),
])  # fmt: skip
def test_a_name_that_leaves_the_memory_open_is_answered_with_what_was_taken(name, taken, others):
    """An A100 is sold with 40 and 80 GB, a V100 with 16 and 32."""
    (note,) = assumed_memory(name)
    assert note.code == "gpu-memory-assumed" and gpu(name).name == taken
    assert all(other in note for other in (taken, *others))
    assert not assumed_memory(taken)


@pytest.mark.parametrize("size", [8, 16, 24, 48, 80, 96])
def test_a_gpu_that_is_named_by_its_memory_has_the_least_of_its_size(size):
    """What fits it fits each GPU of that size; which one it is decides the time, so that is not known."""
    card, of_size = gpu(f"{size}GB"), [each for each in gpus() if each.vendor == "NVIDIA" and
                                       0.9 * size * GiB < each.memory <= size * GiB]  # fmt: skip
    assert card.memory == min(each.memory for each in of_size)
    run = Training(seq_len=128, precision="bf16")
    report = estimated("gpt2", run, card)
    assert report.outcome == "fits" and report.step_seconds is None and report.tokens_per_second is None
    (note,) = assumed_memory(f"{size} gb")
    assert all(each.name in note for each in of_size)


def test_on_a_gpu_without_bf16_units_a_matmul_takes_longer_by_the_peaks():
    """Titan RTX against 2080 Ti: 130.5 and 53.8 TFLOP/s in fp16, with as many bytes per second within 10 %."""
    times = [kernels(name).matmul(4096, 4096, 4096, "fp16") for name in ("RTX-2080-Ti", "TITAN-RTX")]
    assert 2 < times[0] / times[1] < 3


@pytest.mark.parametrize(("name", "backend"), [
    ("M3-Max", "MPS"), ("Apple M4 Pro", "MPS"), ("Arc-B580", "XPU"), ("A770", "XPU"), ("Intel Max 1550", "XPU"),
    ("TPU-v5e", "its own"), ("Gaudi3", "its own"),
])  # fmt: skip
def test_accelerators_without_cuda_are_refused_by_their_backend(name, backend):
    with pytest.raises(NotAvailable, match=rf"{name}: .*({backend} backend|backend of {backend})"):
        gpu(name)
    assert all(not any(re.fullmatch(pattern, _plain(entry.name)) for pattern in OTHER_BACKENDS.values())
               for entry in gpus())  # fmt: skip
