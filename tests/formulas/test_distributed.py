"""Steps on many GPUs, held to published iterations: no constant was fitted to them."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab import Training, model
from llmlab.archive import figure
from llmlab.archive.published_steps import foundry_scaling, llama_405b, megatron_iterations
from llmlab.base.errors import NotAvailable, SpecError
from llmlab.formulas.time.data_parallel import data_parallel
from llmlab.formulas.time.distributed import step
from llmlab.formulas.time.host import host_seconds
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.step import product_seconds, step_seconds
from llmlab.hardware import gpu
from llmlab.hardware.links import cluster
from llmlab.simulation.stacks.megatron import check as check_simulated

H100 = cluster("H100", "InfiniBand-NDR")
LLAMA, LLAMA_405B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-405B"
SMALL = Training(micro_batch=8, precision="autocast-bf16")
GPT_175B = {"model_type": "gpt2", "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 1024,
            "vocab_size": 51200}  # fmt: skip


def predicted(row, overlap=None):
    return step(row.config, row.run, row.card, cluster(row.card, row.network), overlap)


@pytest.mark.parametrize("row", megatron_iterations(), ids=lambda row: row.name)
def test_korthikanti_iterations_within_10_percent(row):
    found = predicted(row)
    assert found.seconds == pytest.approx(row.seconds, rel=0.1)
    assert found.seconds < predicted(row, ()).seconds < 1.1 * found.seconds  # with nothing hidden
    if row.run.checkpointing == "selective" and row.run.dp == 1:
        published = figure("recomputation-iteration-mfu")[row.name.split()[0]]
        assert found.mfu == pytest.approx(published, rel=0.1)


def test_what_recomputation_costs_is_what_they_saved():
    rows = {row.name: predicted(row).seconds for row in megatron_iterations()}
    times = figure("recomputation-iteration-time")
    for size in ("22B", "175B", "530B", "1T"):
        full, selective = (value for label, value in times.values.items() if label.startswith(f"{size}:"))
        assert rows[f"{size} full"] / rows[f"{size} selective"] == pytest.approx(full / selective, rel=0.05)


def test_a_quantized_run_sends_its_linears_fp32():
    """bitsandbytes/nn/modules.py, Linear4bit.forward ends with `.to(inp_dtype)`; peft leaves the stream in fp32."""
    half = Training(micro_batch=64, seq_len=1024, precision="fp16", tp=2, cp=2, lora=lab.LoRA())
    runs = half, replace(half, quantization="nf4")
    half, fp32 = (step("meta-llama/Llama-3.1-8B", run, "T4", cluster("H100", "InfiniBand-NDR")) for run in runs)
    assert fp32.tensor == pytest.approx(2 * half.tensor, rel=0.1)
    assert fp32.context > half.context  # little more: attention hides the ring, and steps are put together in fp32


@pytest.mark.parametrize("row", foundry_scaling(), ids=lambda row: row.name)
def test_fsdp_steps_on_many_gpus(row):
    """Their script gathers parameters in half precision, behind computation: what that hides costs nearly as much."""
    assert predicted(row, ("data",)).seconds == pytest.approx(row.seconds, rel=0.13)


@pytest.mark.parametrize("row", llama_405b()[:2], ids=lambda row: row.name)
def test_llama_3_on_8192_and_16384_gpus(row):
    """arXiv 2407.21783, table 4; 126 layers on 16 stages, interleaved. No constant was fitted to it."""
    timed = step(LLAMA_405B, row.run, "H100", H100, ("data", "tensor"))
    assert timed.mfu == pytest.approx(row.mfu, rel=0.10)
    plain = step(LLAMA_405B, replace(row.run, virtual_stages=1), "H100", H100, ("data", "tensor"))
    assert plain.mfu < 0.8 * row.mfu  # without interleaving it could not have been


def test_torchtitan_405b_gains_by_interleaving_what_was_published():
    """512 H100s. The rates were reached in FP8, with which no step is reckoned: theirs are above ours."""
    run = Training(tp=8, pp=8, dp=8, zero=1, micro_batch=4, accumulation=8, checkpointing="full", seq_len=8192,
                   precision="mixed-bf16", sequence_parallel=True)  # fmt: skip
    interleaved = replace(run, virtual_stages=2)
    plain, mixed = (step(LLAMA_405B, each, "H100", H100, ("data", "tensor")).seconds for each in (run, interleaved))
    published = figure("torchtitan-405b")
    assert plain / mixed == pytest.approx(published["interleaved, tokens/s"] / published["1F1B, tokens/s"], rel=0.03)
    rate = run.global_batch * run.seq_len / run.world_size / mixed
    assert 0.6 < rate / published["interleaved, tokens/s"] < 0.9


def test_unequal_stages_wait_for_the_slowest():
    """126 layers on 8 stages: 16 of them in a middle one. Equal shares of 15.75 would be quicker."""
    run = Training(micro_batch=1, seq_len=8192, precision="mixed-bf16", tp=8, sequence_parallel=True, accumulation=32)
    split, whole = (step(LLAMA_405B, replace(run, pp=pp), "H100", H100) for pp in (8, 1))
    assert split.tensor / whole.tensor == pytest.approx(16 / 126)
    even = step({**model(LLAMA_405B).config, "num_hidden_layers": 128}, replace(run, pp=8), "H100", H100)
    assert split.compute < even.compute  # there the last has 16 layers, and the head
    # Filling and emptying the pipeline is every other stage once: all of one micro-batch, less the slowest.
    once = (split.bubble + (split.compute + split.tensor) / 32) - 7 * split.pipeline / 32
    assert once == pytest.approx((whole.compute + whole.tensor) / 32, rel=0.01)


def test_estimate_says_the_seconds_of_many_devices():
    run = replace(SMALL, dp=16, zero=1)
    report, found = lab.estimate("gpt2", run, "H100"), step("gpt2", run, "H100", H100)
    assert report.step_seconds == found.seconds and report.mfu == pytest.approx(found.mfu)
    assert report.tokens_per_second == pytest.approx(16 * 8 * 1024 / found.seconds)
    assert any(note.code == "interconnect" and "InfiniBand-NDR" in note for note in report.notes)
    slow = lab.estimate("gpt2", run, "H100", cluster("H100", "Ethernet-25", adapters=1))
    assert slow.step_seconds > 1.5 * report.step_seconds
    unknown = lab.estimate("gpt2", replace(run, precision="autocast-fp16"), "T4")
    assert unknown.step_seconds is None and any(note.code == "time-unknown" for note in unknown.notes)
    pair = lab.estimate("gpt2", replace(run, precision="autocast-fp16", dp=2), "T4")  # one node: PCIe joins them
    assert (
        pair.step_seconds > lab.estimate("gpt2", Training(micro_batch=8, precision="autocast-fp16"), "T4").step_seconds
    )


def test_nodes_that_nobody_described_may_have_fewer_adapters():
    """Few tokens on many A100s wait for the network: a quarter of a DGX's adapters, as AWS' p4d has, is within the
    interval, and said. A cluster that is given, or one node, leaves the interval as it is."""
    run = Training(seq_len=2048, dp=64, zero=3, precision="mixed-bf16")
    name = "meta-llama/Llama-2-7b-hf"
    unknown = lab.estimate(name, run, "A100-80GB")
    given = [lab.estimate(name, run, "A100-80GB", cluster("A100-80GB", adapters=n)) for n in (8, 2)]
    assert unknown.step_seconds == given[0].step_seconds and unknown.step_seconds_low == given[0].step_seconds_low
    assert unknown.step_seconds_high == given[1].step_seconds > 1.1 * given[0].step_seconds_high
    longer = given[1].step_seconds / given[0].step_seconds
    (note,) = [note for note in unknown.notes if note.code == "fewer-adapters"]
    assert f"{longer:.1f} times as long" in note
    assert not any(note.code == "fewer-adapters" for report in given for note in report.notes)
    node = replace(run, dp=8)
    alone, there = (lab.estimate(name, node, "A100-80GB", nodes) for nodes in (None, cluster("A100-80GB")))
    assert alone.step_seconds_high == there.step_seconds_high


def test_one_gpu_is_the_time_of_one_gpu():
    run = Training(micro_batch=8, precision="autocast-bf16")
    alone = step("gpt2", run, "H100", H100)
    assert alone.seconds == pytest.approx(step_seconds(model("gpt2"), run, gpu("H100")))
    assert alone.data == alone.tensor == alone.pipeline == alone.bubble == 0


def test_hidden_communication_costs_what_it_takes_inside_a_node():
    """Slower links, whose time computation hides, take no more memory and multiprocessors from it."""
    run = Training(micro_batch=8, seq_len=4096, precision="mixed-bf16", zero=3, dp=16, checkpointing="full")
    links = (cluster("A100", f"InfiniBand-{name}") for name in ("HDR", "EDR"))
    fast, slow = (step("Llama-2-7b-hf", run, "A100", each) for each in links)
    assert slow.data_sent > 1.8 * fast.data_sent
    assert 0.8 * fast.data < slow.data < 1.3 * fast.data
    assert fast.data < 0.95 * fast.data_sent


def test_dtensor_copies_what_it_gathers_along_the_sequence():
    run = Training(micro_batch=1, seq_len=8192, precision="mixed-bf16", tp=2, dp=4, sequence_parallel=True, zero=1)
    megatron, titan = (step("Meta-Llama-3-8B", replace(run, zero=zero), "H100", H100).tensor for zero in (1, 3))
    assert titan > 1.2 * megatron


def test_what_is_cast_by_tensor_is_gathered_in_fp8():
    """torchao's Float8ColwiseParallel and Float8RowwiseParallel: half the bytes of all gathers; sums stay in bf16."""
    run = Training(micro_batch=8, seq_len=8192, precision="mixed-bf16", tp=8, dp=2, sequence_parallel=True, zero=3,
                   compile=True, checkpointing="full")  # fmt: skip
    run = replace(run, stack="torchtitan")
    whole, rowwise, cast = (step("Llama-3.1-70B", replace(run, fp8=fp8), "H100", H100).tensor
                            for fp8 in (None, "rowwise", "tensorwise"))  # fmt: skip
    assert whole == rowwise and 0.7 * whole < cast < 0.8 * whole


def test_tensor_parallel_belongs_inside_a_node():
    run = Training(micro_batch=1, seq_len=4096, precision="mixed-bf16", tp=8)
    inside = step("meta-llama/Llama-3.1-8B", run, "H100", H100)
    outside = step("meta-llama/Llama-3.1-8B", run, "H100", cluster("H100", "InfiniBand-NDR", gpus=1))
    assert outside.tensor > 4 * inside.tensor
    sequence = step("meta-llama/Llama-3.1-8B", replace(run, sequence_parallel=True), "H100", H100)
    assert sequence.tensor > inside.tensor  # halves of an all-reduce gain nothing from a switch that adds
    assert sequence.compute < inside.compute  # norms and dropout divided


def test_sequence_parallelism_gathers_again_only_what_was_not_kept():
    """Four gathers and four scatters per layer; with selective checkpointing six gathers (arXiv 2205.05198)."""
    run = Training(seq_len=4096, precision="bf16", tp=8, sequence_parallel=True)
    spec, collective, group = model("meta-llama/Llama-3.1-8B"), kernels("H100").collective, H100.group(8)
    gather, scatter = (collective(each, 2 * 4096 * spec.hidden, group) for each in ("all-gather", "reduce-scatter"))
    for checkpointing, gathers, scatters in ((None, 4, 4), ("selective", 6, 4), ("full", 6, 6)):
        found = step(spec, replace(run, checkpointing=checkpointing), "H100", H100).tensor
        assert found == pytest.approx(spec.layers * (gathers * gather + scatters * scatter))


def test_pipeline_bubble_and_interleaving():
    run = Training(micro_batch=1, seq_len=4096, precision="mixed-bf16", pp=4, accumulation=12)
    plain = step("meta-llama/Llama-3.1-8B", run, "H100", H100)
    mixed = step("meta-llama/Llama-3.1-8B", replace(run, virtual_stages=2), "H100", H100)
    assert mixed.bubble == pytest.approx(plain.bubble / 2, rel=0.05)
    assert mixed.pipeline == pytest.approx(2 * plain.pipeline)
    assert plain.bubble / plain.compute < 3 / 12  # the last stage, with the head, is slower than those that fill


def test_experts_and_context_are_paid_for():
    mixtral = "mistralai/Mixtral-8x7B-v0.1"
    run = Training(micro_batch=1, seq_len=4096, precision="mixed-bf16", dp=8, ep=8)
    assert step(mixtral, run, "H100", H100).experts > 0
    far = step(mixtral, run, "H100", cluster("H100", "InfiniBand-NDR", gpus=1))
    assert far.experts > 3 * step(mixtral, run, "H100", H100).experts
    long = Training(micro_batch=1, seq_len=65536, precision="mixed-bf16", cp=8)
    assert step("meta-llama/Llama-3.1-8B", long, "H100", H100).context > 0


def test_all_ranks_wait_for_the_busiest_experts():
    spec = lab.model("Qwen/Qwen3-30B-A3B")
    run = Training(seq_len=4096, precision="mixed-bf16", dp=8, ep=8, zero=3, stack="torchtitan:ac=none")
    even, busy = (step(spec, replace(run, expert_imbalance=times), "H100", H100) for times in (1, 3))
    assert busy.experts == pytest.approx(3 * even.experts, rel=0.1)  # all-to-alls, which have a latency too
    assert even.attention == busy.attention and even.data_sent == busy.data_sent
    reports = [lab.estimate(spec, replace(run, expert_imbalance=times), "H100") for times in (1, 3)]
    assert reports[0].flops == reports[1].flops and reports[0].mfu > reports[1].mfu
    # Without checkpointing, the block keeps of each additional row its input and four tensors of the experts' width.
    rows = 2 * spec.experts_per_token * run.tokens
    kept = 2 * rows * (spec.hidden + 4 * spec.moe_intermediate) * spec.layers
    assert reports[1].peak_allocated - reports[0].peak_allocated == pytest.approx(kept, rel=0.05)
    # Mixtral's wide experts: three times as many rows take three times as long.
    mixtral = lab.model("mistralai/Mixtral-8x7B-v0.1")
    wide = Training(seq_len=4096, precision="mixed-bf16", dp=8, ep=8)
    even, busy = (product_seconds(mixtral, replace(wide, expert_imbalance=times), kernels("H100")) for times in (1, 3))
    assert busy["experts"] == pytest.approx(3 * even["experts"], rel=0.1) and busy["attention"] == even["attention"]


@pytest.mark.parametrize(("imbalance", "given"), [
    (2, {}), (5, {"ep": 4}), (0.5, {"ep": 4}), ("even", {"ep": 4}), (float("nan"), {"ep": 4}),
    (2, {"ep": 4, "stack": "megatron:moe_expert_capacity_factor=1"}),
])  # fmt: skip
def test_an_imbalance_that_cannot_be_is_refused(imbalance, given):
    with pytest.raises(SpecError, match=f"expert_imbalance={imbalance!r}"):
        Training(dp=4, expert_imbalance=imbalance, **given)


def test_attention_hides_the_ring_and_a_slow_network_shows():
    """A rank attends to some keys while the next are on their way: of long sequences little is left, of short ones on
    one adapter a node almost all. Torch moves more bytes than Megatron-LM to put the steps together, the more of them
    the more, and a compiler saves some."""
    spec, apart, found = lab.model(LLAMA), cluster("H100", "InfiniBand-NDR", gpus=1), kernels("H100")

    def of(seq_len, nodes, cp=8, **settings):
        run = Training(micro_batch=1, seq_len=seq_len, precision="mixed-bf16", cp=cp, attention="flash", **settings)
        sent = 3 * (cp - 1) * found.collective("send", 4 * spec.key_width * seq_len / cp, nodes.group(cp))
        return step(spec, run, "H100", nodes), sent * spec.layers

    (long, sent), (short, whole) = (of(tokens, apart, stack="megatron") for tokens in (131072, 4096))
    assert long.context < 0.25 * sent and sent < long.attention
    assert 0.8 * (whole - short.attention) < short.context < whole and whole > 5 * short.attention
    torch, compiled, megatron = (
        of(65536, H100, **settings)[0].context for settings in ({}, {"compile": True}, {"stack": "megatron"})
    )
    assert torch > 2 * compiled > 2 * megatron
    assert of(65536, H100, cp=8)[0].context > 1.2 * of(16384, H100, cp=2)[0].context  # as many tokens on a rank


def test_what_cannot_be_predicted():
    with pytest.raises(NotAvailable, match="no PCIe link is known for GB200"):
        step("gpt2", Training(dp=2, zero=3, offload="optimizer", precision="mixed-bf16"), "GB200", cluster("GB200"))
    with pytest.raises(SpecError, match=r"virtual_stages=20 with pp=8: .* layers"):
        run = Training(pp=8, precision="mixed-bf16", accumulation=8, virtual_stages=20)
        step(LLAMA_405B, run, "H100", H100)
    with pytest.raises(SpecError, match="'all'"):
        step("gpt2", SMALL, "H100", H100, overlap=("all",))


MEGATRON = Training(micro_batch=1, seq_len=4096, precision="mixed-bf16", tp=8, pp=2, dp=2, zero=1, accumulation=8,
                    sequence_parallel=True, stack=lab.Megatron())  # fmt: skip


def test_megatron_hides_what_its_options_say():
    """--tp-comm-overlap sends pieces behind products; interleaved stages send behind one another."""
    spec = "meta-llama/Llama-3.1-70B"
    plain = step(spec, MEGATRON, "H100", H100)
    assert plain == step(spec, MEGATRON, "H100", H100, ("data", "tensor")) and plain.pipeline > 0
    pieces = step(spec, replace(MEGATRON, stack=lab.Megatron(tp_comm_overlap=True)), "H100", H100)
    assert pieces.tensor == pytest.approx(plain.tensor / 8) and pieces.products == plain.products
    run = replace(MEGATRON, stack=lab.Megatron(virtual_pipeline=5))
    virtual = step(spec, run, "H100", H100)
    assert virtual.pipeline == 0 and virtual.bubble < plain.bubble / 4
    open_ = step(spec, replace(run, stack=replace(run.stack, overlap_p2p_communication=False)), "H100", H100)
    assert open_.pipeline == 5 * plain.pipeline and open_.products == virtual.products


def test_kernels_that_wait_for_the_host_one_by_one_take_its_time_too():
    """CUDA_LAUNCH_BLOCKING=1: no kernel is started while another runs, or while ranks send."""
    spec = lab.model("meta-llama/Llama-2-7b-hf")
    for pp in (1, 4):
        run = replace(MEGATRON, tp=4, pp=pp)
        waits = replace(run, stack=lab.Megatron(cuda_launch_blocking=True))
        found, blocked = (step(spec, each, "A100", cluster("A100", "InfiniBand-HDR")) for each in (run, waits))
        host = host_seconds(spec, run, kernels("A100").host)
        assert blocked.launches == pytest.approx(host) and found.launches < host / 10
        assert blocked.products == pytest.approx(found.products) and blocked.tensor == found.tensor
    alone = replace(run, tp=1, pp=1, dp=1, zero=0, sequence_parallel=False)
    seconds = [lab.estimate(spec, replace(alone, stack=each), "A100").time for each in (run.stack, waits.stack)]
    assert seconds[1]["launches"] == pytest.approx(host_seconds(spec, alone, kernels("A100").host))
    assert "launches" not in seconds[0]


def test_one_cuda_graph_of_a_step_waits_for_no_host():
    """And what it keeps of the memory is not known, which the report says."""
    spec = lab.model("gpt2")
    run = lab.Training(micro_batch=2, seq_len=256, stack="megatron")
    graph = replace(run, stack=lab.Megatron(cuda_graph_impl="full_iteration"))
    eager, whole = (lab.estimate(spec, each, "H100") for each in (run, graph))
    assert eager.time["launches"] > eager.step_seconds / 2 and "launches" not in whole.time
    assert whole.step_seconds_low < whole.step_seconds < eager.step_seconds / 2
    assert whole.peak_allocated == eager.peak_allocated
    assert ["cuda-graph-pool" in [note.code for note in each.notes] for each in (eager, whole)] == [False, True]
    own = replace(graph, attention="eager", stack=replace(graph.stack, transformer_engine=False))
    with pytest.raises(lab.NotAvailable, match="simulate has no CUDA graphs"):
        check_simulated(spec, own)


def test_megatron_waits_for_gradients_that_nothing_hides():
    """Without --overlap-grad-reduce all that data parallelism sends is exposed, gradients in fp32 unless asked."""
    spec, rates = lab.model("meta-llama/Llama-3.1-8B"), kernels("H100")
    hidden = replace(MEGATRON, tp=1, sequence_parallel=False)
    waiting = replace(hidden, stack=lab.Megatron(overlap_grad_reduce=False))
    after, behind = (step(spec, run, "H100", H100) for run in (waiting, hidden))
    assert after.data_exposed == after.data_sent == behind.data_sent > 2 * behind.data_exposed
    half = replace(hidden, stack=lab.Megatron(accumulate_allreduce_grads_in_fp32=False))
    for zero, bytes_less in ((0, 2 * 2), (1, 2)):
        runs = (replace(run, zero=zero, pp=1, tp=1, dp=8) for run in (hidden, half))
        wide, narrow = (data_parallel(spec, run, H100, rates, 1.0, 1 / 3, ("data",), 2**25) for run in runs)
        assert wide.bytes - narrow.bytes == bytes_less * spec.parameters and wide.sent > 1.2 * narrow.sent


def test_megatrons_gather_ends_the_step_where_nothing_hides_it():
    """Without --overlap-param-gather gradients alone are behind computation; with neither nothing is."""
    spec, run = lab.model("meta-llama/Llama-3.1-8B"), replace(MEGATRON, tp=1, pp=1, dp=16, sequence_parallel=False)
    hidden, gathers, neither, both = (
        step(spec, replace(run, stack=f"megatron:{options}"), "H100", H100).data_exposed
        for options in ("tp_comm_overlap=false", "overlap_param_gather=false", "overlap_grad_reduce=false",
                        "overlap_grad_reduce=false,overlap_param_gather=false")
    )  # fmt: skip
    weights = kernels("H100").collective("all-gather", 2 * spec.parameters, H100.group(16))
    assert hidden < weights < gathers < neither == both
    assert gathers - hidden == pytest.approx(weights, rel=0.25)  # sent by blocks; nothing hides the first one's anyway


@pytest.mark.parametrize(("zero", "default"), [(0, False), (1, False), (2, False), (3, True)])
def test_deepspeed_hides_what_overlap_comm_says(zero, default):
    """True at stage 3 alone where nobody says it (runtime/zero/config.py); stage 0 does not read it."""
    spec = lab.model("meta-llama/Llama-3.1-8B")
    run = Training(micro_batch=2, seq_len=4096, dp=16, precision="mixed-bf16", zero=zero, stack="deepspeed")
    as_it_is, hides, waits = (
        step(spec, replace(run, stack=f"deepspeed:{option}"), "H100", H100)
        for option in ("torch_adam=false", "overlap_comm=true", "overlap_comm=false")
    )
    assert as_it_is == (hides if default else waits)
    assert waits.data_exposed == pytest.approx(waits.data_sent)
    assert (hides.data_exposed < 0.7 * hides.data_sent) is (zero > 0)


@pytest.mark.parametrize(("distance", "again"), [(4_000_000_000, 0.0), (1_812_000_000, 0.5), (1, 1.0)])
def test_deepspeed_gathers_again_what_is_used_again_too_late(distance, again):
    """Recomputation uses a block's first matrix again 2 x 1.81e9 parameters later, and its last at once."""
    run = Training(seq_len=1024, dp=128, zero=3, precision="mixed-fp16", checkpointing="full", stack="deepspeed")
    far, near = (
        step(GPT_175B, replace(run, stack=f"deepspeed:stage3_max_reuse_distance={each}"), "A100-80GB",
             cluster("A100-80GB")) for each in (distance, 4_000_000_000)
    )  # fmt: skip
    assert far.data_sent - near.data_sent == pytest.approx(96 * again * near.layer["gather"], rel=0.01, abs=1e-9)


@pytest.mark.parametrize(("card", "checkpointing", "seconds"),
                         [("H100-80GB", None, 0.0832), ("A100-80GB", "full", 0.1315)])  # fmt: skip
def test_megatrons_python_is_most_of_a_tiny_step(card, checkpointing, seconds):
    """Golden values of Megatron-LM's tests, which log besides: 12 layers of 512, a micro-batch of 4 × 1024."""
    spec = {"model_type": "gpt2", "n_embd": 512, "n_layer": 12, "n_head": 8, "vocab_size": 50304, "n_positions": 1024}
    run = Training(micro_batch=4, seq_len=1024, dp=8, attention="eager", checkpointing=checkpointing,
                   zero=0 if checkpointing else 1, stack=lab.Megatron(overlap_grad_reduce=False))  # fmt: skip
    found = step(spec, run, card, cluster(card))
    assert 0.6 * seconds < found.seconds < seconds
    assert found.launches > found.compute / 3


def test_a_rate_of_ones_own_stands_for_what_others_measured():
    """In a node of PCIe, for which there are published ones, and in one of NVLink, for which there are grids."""
    run, size = replace(SMALL, dp=8, zero=3), 2**28
    for card in ("L40S", "H100"):
        usual, own = cluster(card), cluster(card, reached=3e9)
        same = replace(usual, inside=replace(usual.inside, reached=3e9, switched=None))  # by a Link
        for operation in ("all-reduce", "all-gather"):
            group = own.group(8)
            taken = kernels(card).collective(operation, size, group)
            assert taken == kernels(card).collective(operation, size, same.group(8))
            assert taken == pytest.approx((2 if operation == "all-reduce" else 1) * 7 / 8 * size / 3e9, rel=0.1)
        assert step("gpt2-xl", run, card, own) == step("gpt2-xl", run, card, same)
        assert step("gpt2-xl", run, card, own).data_sent > 3 * step("gpt2-xl", run, card, usual).data_sent


def test_a_host_that_is_late_starts_kernels_while_ranks_send():
    """So messages add nothing to a step that waits for its host."""
    run = Training(seq_len=128, precision="mixed-bf16", tp=2, stack="megatron")
    fast, slow = (step("gpt2", run, "H100", cluster("H100", reached=rate)) for rate in (400e9, 100e9))
    assert slow.tensor > fast.tensor and fast.launches > 0
    assert slow.launches + slow.tensor == pytest.approx(fast.launches + fast.tensor)
