"""A step's seconds by part, and one layer's."""

from dataclasses import replace
from math import log

import pytest

import llmlab as lab
from benchmarks.time import training_rates as derivation
from llmlab import Training
from llmlab.formulas.time.distributed import step
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.kernels import kernels, training_rates
from llmlab.formulas.time.step import outside
from llmlab.hardware import gpu
from llmlab.hardware.links import cluster, pcie_rates


@pytest.mark.parametrize(("checkpointing", "least", "most"), [(None, 1.95, 2.1), ("full", 2.6, 3)])
def test_a_layers_backward_is_two_forwards_and_with_recomputation_almost_three(checkpointing, least, most):
    """Recomputation stops before the block's last product. The layers share equally what the blocks compute."""
    run = lab.Training(micro_batch=4, seq_len=1024, precision="bf16", checkpointing=checkpointing)
    report = lab.estimate("Llama-3.1-8B", run, "H100")
    layer = report.layer_time
    assert least < layer["backward"] / layer["forward"] < most
    computed = sum(report.time[part] for part in ("products", "attention", "elementwise"))
    assert 32 * (layer["forward"] + layer["backward"]) == pytest.approx(computed)


def test_the_further_a_rate_is_from_a_measurement_the_wider_is_the_interval():
    run = Training(micro_batch=256, seq_len=512, precision="fp16", compile=True)  # nothing waits for the host
    names = ("T4", "H100", "A100-40GB", "RTX-6000-Ada", "V100", "MI350X")  # fitted, measured, transferred, AMD
    reports = {name: lab.estimate("gpt2", run, name) for name in names}
    wide = {name: report.step_seconds_high / report.step_seconds_low for name, report in reports.items()}
    assert wide["A100-40GB"] == pytest.approx(wide["RTX-6000-Ada"], rel=0.01)
    assert wide["T4"] < wide["H100"] < wide["A100-40GB"] < min(wide["V100"], wide["MI350X"])


def test_the_interval_has_the_attention_of_an_older_torch_where_that_takes_another():
    """torch takes cuDNN's first if it is newer than 9.15 (check_prefer_cudnn_attention), which 2.10's wheels for CUDA
    12 do not bring; torchtitan asks for it."""
    run = Training(seq_len=8192, precision="bf16")
    ours, flash, ampere = (lab.estimate("Llama-3.1-8B", replace(run, attention=name), card)
                           for name, card in (("sdpa", "H100"), ("flash", "H100"), ("sdpa", "A100")))  # fmt: skip
    more = flash.step_seconds - ours.step_seconds
    assert more > 0 and f"{more:.2g} s more" in ours.time_sources["attention"]
    # Without it the interval is as wide for either kernel, as a factor.
    width = flash.step_seconds_high / flash.step_seconds
    assert ours.step_seconds_high - more == pytest.approx(width * ours.step_seconds, rel=0.01)
    sharded = replace(run, dp=8, zero=3, precision="mixed-bf16", stack="torchtitan")
    for other in (flash, ampere, lab.estimate("Llama-3.1-8B", sharded, "H100")):
        assert "s more" not in other.time_sources["attention"]


def test_what_was_not_measured_is_said_and_widens_the_interval():
    run = Training(seq_len=1024, precision="bf16", compile=True)
    long = lab.estimate("Llama-3.1-8B", replace(run, seq_len=32768), "H100")
    gpt2 = {**lab.model("gpt2").config, "attn_pdrop": 0.0}  # with dropout, older releases run another kernel
    known, single = (lab.estimate(gpt2, replace(run, micro_batch=16, precision=p), "H100") for p in ("bf16", "fp32"))
    assert "70% of the data sheet, because fp32 was not measured" in single.time_sources["products"]
    assert "beyond 16,384 tokens" in long.time_sources["attention"]
    assert "beyond" not in known.time_sources["attention"]
    width = {name: each.step_seconds / each.step_seconds_low for name, each in
             (("known", known), ("long", long), ("single", single))}  # fmt: skip
    assert 1.05 * width["known"] < width["long"] and 1.05 * width["long"] < width["single"]


def test_a_step_that_waits_for_its_host_is_as_uncertain_as_the_host():
    run = Training(seq_len=256, precision="mixed-bf16")
    name = "Llama-3.2-1B"
    waits, computes = (lab.estimate(name, replace(run, seq_len=n, micro_batch=n // 64), "H100") for n in (64, 1024))
    assert "launches" in waits.time and "launches" not in computes.time
    hosts = [efficiency(name).dispatch for name in ("T4", "A100")]
    update = waits.time["optimizer"]  # which is the card's alone
    slower = (waits.step_seconds_high - update) / (waits.step_seconds - update)
    assert slower == pytest.approx(max(hosts) / min(hosts), rel=0.1)
    own = kernels(lab.gpu("H100")).interval
    assert computes.step_seconds_high / computes.step_seconds == pytest.approx(own, rel=0.01)


def test_short_steps_on_one_gpu_may_wait_for_their_loop():
    """Published loops of small models took some milliseconds longer than their kernels, which long steps hide. Several
    GPUs have an engine, whose time is added."""
    run = Training(seq_len=1024, precision="autocast-bf16", attention="flash", compile=True)
    own = kernels(lab.gpu("H100")).interval

    def widths(**changes):
        report = lab.estimate("gpt2", replace(run, **changes), "H100")
        return report.step_seconds_high / report.step_seconds, report.step_seconds / report.step_seconds_low

    short, long = widths(micro_batch=8), widths(micro_batch=8, accumulation=64)
    assert short[0] > 1.3 * own and long[0] == pytest.approx(own, rel=0.01)
    assert short[1] == pytest.approx(own, rel=0.01)


SMALL = Training(micro_batch=8, precision="autocast-bf16")
GPT_175B = {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 1024,
            "vocab_size": 51200}  # fmt: skip


def test_the_interval_has_a_network_that_others_use_and_what_deepspeed_may_not_hide():
    """Azure's 128 A100s (deepspeed-azure in throughputs.toml): 4 sequences took 34.5 s, between what is hidden and not.
    A DeepSpeed that hides nothing is that already; within a node there is no network."""
    run = Training(micro_batch=4, seq_len=1024, dp=128, zero=3, precision="mixed-fp16", checkpointing="full",
                   attention="eager", stack="deepspeed:stage3_max_reuse_distance=3000000000")  # fmt: skip
    nodes = cluster("A100-80GB")
    found = lab.estimate(GPT_175B, run, "A100-80GB", nodes)
    waits = step(GPT_175B, run, "A100-80GB", nodes, overlap=()).seconds
    assert found.step_seconds < 34.5 < waits < found.step_seconds_high
    (note,) = [note for note in found.notes if note.code == "slower-communication"]
    assert "71%" in note and "16 nodes" in note and "DeepSpeed" in note
    told = lab.estimate(GPT_175B, replace(run, stack="deepspeed:overlap_comm=false"), "A100-80GB", nodes)
    assert told.step_seconds_high / told.step_seconds < found.step_seconds_high / found.step_seconds
    small, eight = "meta-llama/Llama-2-7b-hf", replace(run, micro_batch=1, dp=8, stack="transformers")
    few = cluster("A100-80GB", adapters=2)
    shared, alone = (lab.estimate(small, each, "A100-80GB", few) for each in (replace(eight, dp=1024), eight))
    assert shared.step_seconds_high / shared.step_seconds > 1.2 * alone.step_seconds_high / alone.step_seconds
    assert not any(note.code == "slower-communication" for note in alone.notes)


def test_an_interval_has_eight_of_ten_published_nodes():
    """Who says his own node's rate gets the interval of his card alone."""
    for card, of in (("L40S", 8), ("L40S", 2), ("RTX-4090", 8)):
        run, nodes = replace(SMALL, dp=of, zero=3), cluster(card)
        rates = pcie_rates(nodes.inside, of, gpu(card).peer_access)
        usual = lab.estimate("gpt2-xl", run, card)
        slow, fast = (lab.estimate("gpt2-xl", run, card, nodes.reaching(rate)) for rate in (rates.slow, rates.fast))
        assert usual.step_seconds_low < fast.step_seconds < usual.step_seconds < slow.step_seconds
        assert slow.step_seconds < usual.step_seconds_high
        alone = replace(run, dp=1, zero=0)
        assert slow.step_seconds / slow.step_seconds_low == pytest.approx(_below("gpt2-xl", alone, card), rel=0.02)
        assert usual.step_seconds / usual.step_seconds_low > slow.step_seconds / slow.step_seconds_low
        (note,) = [note for note in usual.notes if note.code == "pcie-rate"]
        assert f"{rates.slow / 1e9:.2g} to {rates.fast / 1e9:.2g} GB/s" in note
        assert not any(note.code == "pcie-rate" for note in slow.notes)
        assert "pcie_nodes.toml" in usual.time_sources["data"] and "given" in slow.time_sources["data"]


def _below(name, run, card):
    report = lab.estimate(name, run, card)
    return report.step_seconds / report.step_seconds_low


def test_intervals_widen_where_engines_and_hosts_differ():
    run = Training(micro_batch=1, seq_len=2048, precision="mixed-bf16", dp=8, zero=1)

    def width(run, card):
        report = lab.estimate("Llama-3.2-1B", run, card)
        return report.step_seconds_high / report.step_seconds_low

    long = replace(run, accumulation=64)
    alone = replace(long, dp=1, zero=0)
    assert width(long, "A100") == pytest.approx(width(alone, "A100"), rel=0.02)
    assert width(run, "A100") > 1.2 * width(long, "A100")  # an engine's own time, beside a short step
    piped = replace(long, dp=4, pp=2)  # by an engine that is not named
    assert width(piped, "A100") > 1.05 * width(replace(piped, stack="megatron"), "A100")
    # Without peer access nodes differ more: what is sent goes through the host's memory.
    sharded = replace(run, zero=3, dp=2)
    assert width(sharded, "RTX-4090") > 1.5 * width(sharded, "RTX-6000-Ada")
    assert width(alone, "MI300X") > 1.3 * width(alone, "RTX-4090")  # other libraries too


def test_products_that_are_extrapolated_widen_the_interval():
    """Cut to a quarter of their axes, the measured grids extrapolate 8 in 10 products to within `beyond`, which comes
    to the rest as the share of the step's time that such products have."""
    spread = training_rates()["spread"]
    assert derivation.beyond() == pytest.approx(spread["beyond"], rel=0.005)
    found, run = kernels("A100"), Training(micro_batch=8, seq_len=1024, precision="bf16", compile=True)
    assert not found.extrapolates(8193, 8192, 8192, "bf16") and found.extrapolates(8193, 8193, 8192, "bf16")
    assert found.extrapolates(64, 65537, 64, "fp16") and not found.extrapolates(8193, 8193, 64, "fp32")
    assert not kernels("T4").extrapolates(10**6, 10**6, 64, "fp16")  # fitted, to records of whole steps
    spec = lab.model("Llama-3.1-8B")
    for rows in (8, 64):
        report = lab.estimate(spec, replace(run, micro_batch=rows), "A100")
        share = outside(spec, replace(run, micro_batch=rows), found).extrapolated_s / report.step_seconds
        assert (0.03 < share < 0.1) if rows == 8 else (0.2 < share < 0.4)
        wide = (spread["measured"] ** 2 + (share * spread["beyond"]) ** 2) ** 0.5
        assert log(report.step_seconds_high / report.step_seconds) == pytest.approx(wide, rel=0.005)


def test_a_report_says_where_each_rate_is_from():
    run = Training(micro_batch=1, seq_len=2048, precision="mixed-bf16", dp=8, zero=3)
    report = lab.estimate("Llama-3.1-8B", run, "H100")
    assert set(report.time_sources) == set(report.time) and "nccl 2.29.2" in report.time_sources["data"]
    assert any(label.strip() == "80 % interval" for label, _ in report.rows())
    assert lab.Report.from_json(report.to_json()) == report


def test_the_share_that_is_extrapolated_is_said():
    """The head's matmul, from 2,048 to 128,256 columns, then the MLP's too: 8,192 rows were measured on an A100."""
    run = lab.Training(micro_batch=16, seq_len=1024, precision="bf16", attention="flash")
    texts = [lab.estimate(name, run, "A100").time_sources["products"] for name in ("Llama-3.2-1B", "Llama-3.1-8B")]
    one, eight = (int(text.split("; ")[1].split("%")[0]) for text in texts)
    assert 0 < one < 25 < eight < 60
    assert "extrapolated" not in lab.estimate("Llama-2-7b-hf", run, "H100").time_sources["products"]
