"""Steps on many GPUs, held to published iterations: no constant was fitted to them."""

from dataclasses import replace

import pytest
import torch
import transformers

import llmlab as lab
from llmlab import Training, model
from llmlab.archive import figure
from llmlab.archive.published_steps import foundry_scaling, llama_405b, megatron_iterations
from llmlab.base.errors import NotAvailable, SpecError
from llmlab.formulas.time import elementwise
from llmlab.formulas.time.data_parallel import data_parallel, ddp_buckets, tensors
from llmlab.formulas.time.distributed import step
from llmlab.formulas.time.host import host_seconds
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.step import product_seconds, step_seconds
from llmlab.hardware import gpu
from llmlab.hardware.links import cluster, pcie_rates
from llmlab.simulation.stacks.megatron import check as check_simulated

H100 = cluster("H100", "InfiniBand-NDR")
LLAMA, LLAMA_405B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-405B"
SMALL = Training(micro_batch=8, precision="autocast-bf16")
DEEP = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 64,
        "intermediate_size": 28672, "vocab_size": 1000, "max_position_embeddings": 4096,
        "tie_word_embeddings": True}  # fmt: skip
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


def test_adapters_send_adapters():
    lora = Training(micro_batch=8, precision="autocast-bf16", dp=8, lora=lab.LoRA(rank=8, targets=("c_attn",)))
    for zero in (0, 1):  # gradients, and what the update changed
        runs = (replace(lora, zero=zero), replace(lora, zero=zero, lora=None))
        adapters, whole = (step("gpt2", run, "H100", H100).data_sent for run in runs)
        assert adapters < 0.3 * whole


def test_one_gpu_is_the_time_of_one_gpu():
    run = Training(micro_batch=8, precision="autocast-bf16")
    alone = step("gpt2", run, "H100", H100)
    assert alone.seconds == pytest.approx(step_seconds(model("gpt2"), run, gpu("H100")))
    assert alone.data == alone.tensor == alone.pipeline == alone.bubble == 0


@pytest.mark.parametrize("size", [2**20, 25 * 2**20, 200 * 2**20])
@pytest.mark.parametrize("name", ["gpt2-xl", "meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1"])
def test_buckets_are_those_that_torch_fills(name, size):
    """A matrix larger than a bucket has one of its own: Llama 3.1 8B's halves lie in 162 of 25 MiB, not in 613."""
    spec = model(name)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**spec.config))
        made = [torch.empty_like(p, dtype=torch.bfloat16) for p in reversed([*whole.parameters()])]
    filled, _ = torch.distributed._compute_bucket_assignment_by_size(made, [size])
    counted = ddp_buckets(spec, Training(dp=8, seq_len=64, precision="bf16"), size)
    assert abs(counted - len(filled)) <= 1  # of GPT-2's vectors the last can be alone


def test_adapters_share_buckets():
    run = Training(dp=8, seq_len=64, precision="bf16", lora=lab.LoRA(64, targets=["q_proj", "v_proj", "down_proj"]))
    assert ddp_buckets(model(LLAMA), run, 25 * 2**20) == 10
    assert ddp_buckets(model(LLAMA), run, 2**20) == 160  # as torch fills them with peft's


def test_data_parallel_sends_its_gradients_once():
    run = replace(SMALL, dp=8)
    found = step("gpt2", run, "H100", H100, overlap=(), bucket_bytes=2**30)
    gradients = 4 * model("gpt2").parameters
    assert found.data == found.data_sent
    assert found.data == pytest.approx(kernels("H100").collective("all-reduce", gradients, H100.group(8)))
    many = step("gpt2", run, "H100", H100, overlap=(), bucket_bytes=2**16)
    assert many.data > 2 * found.data  # each message costs its latency: one for every matrix
    hidden = step("gpt2", run, "H100", H100)
    # The tied embedding, a third of all, is ready last; the rest takes memory and multiprocessors from computation.
    assert 0.4 < hidden.data / hidden.data_sent < 1
    accumulated = step("gpt2", replace(run, accumulation=4), "H100", H100)
    assert accumulated.data_sent == pytest.approx(hidden.data_sent)  # no_sync


@pytest.mark.parametrize("zero", [2, 3])
def test_fsdp_that_waits_scatters_gradients_once_and_gathers_as_often(zero):
    run = replace(SMALL, dp=8, zero=zero, accumulation=4)
    each, last = (step(DEEP, replace(run, sync_each_batch=sync), "H100", H100, overlap=()) for sync in (True, False))
    scatter = kernels("H100").collective("reduce-scatter", 4 * model(DEEP).parameters, H100.group(8))
    assert each.data_sent - last.data_sent == pytest.approx(3 * scatter, rel=0.02)


def test_fsdp_that_waits_is_faster_where_links_are_slow_and_reads_whole_sums():
    """On fast links its reductions were hidden, and the sums of whole gradients, in fp32, are what it pays."""
    run = Training(seq_len=2048, precision="mixed-bf16", dp=8, zero=3, accumulation=4, checkpointing="full")
    slow, fast = (
        [step("meta-llama/Llama-3.2-1B", replace(run, sync_each_batch=sync), card, nodes) for sync in (True, False)]
        for card, nodes in (("L4", cluster("L4", reached=1.2e9)), ("H100", H100))
    )
    assert slow[1].seconds < 0.9 * slow[0].seconds
    assert fast[1].data < fast[0].data and fast[1].elementwise > fast[0].elementwise
    whole = model("meta-llama/Llama-3.2-1B").parameters
    read = [elementwise.accumulated(model("meta-llama/Llama-3.2-1B"), replace(run, sync_each_batch=sync))
            for sync in (True, False)]  # fmt: skip
    assert read == [0, (2 + 4 + 3 * (2 + 4 + 4)) * whole]  # the first cast, and three added


@pytest.mark.parametrize(
    ("zero", "stack", "sent"),
    [(0, "transformers", ["all-reduce"]), (1, "deepspeed", ["reduce-scatter", "all-gather"]),
     (1, "transformers", ["all-reduce", "broadcast"]), (2, "transformers", ["reduce-scatter", "all-gather"]),
     (3, "transformers", ["all-gather", "all-gather", "reduce-scatter"])],
)  # fmt: skip
def test_volume_of_the_stages(zero, stack, sent):
    """ZeRO, arXiv 1910.02054, section 7: 2P up to stage 2, 3P for stage 3; a head and embedding gathered once.
    PyTorch's stage 1 sums all gradients on all ranks, and sends 3P."""
    precision, width = ("mixed-bf16", 2) if stack == "deepspeed" else ("autocast-bf16", 4)
    run = replace(SMALL, dp=8, zero=zero, seq_len=512, precision=precision, stack=stack)
    a100 = cluster("A100-80GB", "InfiniBand-HDR")
    found = step(DEEP, run, "A100-80GB", a100, overlap=(), bucket_bytes=2**30)
    size, collective = width * model(DEEP).parameters, kernels("A100-80GB").collective
    assert found.data_sent == pytest.approx(sum(collective(each, size, a100.group(8)) for each in sent), rel=0.02)


@pytest.mark.parametrize("gpus", [64, 128, 256, 512, 1024])
def test_broadcasts_that_go_round_all_ranks(gpus):
    """InternLM/InternEvo, doc/en/train_performance.md: what tokens/s the 7B model loses where a tensor's states are one
    of all ranks' (zero1=-1), not one of a node's (zero1=8). Its engine broadcasts tensor after tensor, as PyTorch's:
    hybrid_zero_optim.py, broadcast_params, at c18bec9. No constant was fitted to it."""
    all_ranks = {64: 3690, 128: 3571, 256: 3209, 512: 2861, 1024: 2271}[gpus]
    one_node = {64: 3944, 128: 3928, 256: 3920, 512: 3835, 1024: 3625}[gpus]
    longer = 4 * 2 * 2048 * (1 / all_ranks - 1 / one_node)
    spec = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "intermediate_size": 11008, "vocab_size": 103168, "max_position_embeddings": 2048,
            "attention_bias": True}  # fmt: skip
    roce = cluster("A100-80GB", "RoCE-100", adapters=4)
    run = Training(micro_batch=2, seq_len=2048, precision="bf16", attention="flash", accumulation=4, zero=1, dp=gpus)
    whole, nodes = (step(spec, each, "A100-80GB", roce) for each in (run, replace(run, dp_replicate=gpus // 8)))
    assert whole.seconds - nodes.seconds == pytest.approx(longer, rel=0.35)
    # Of an engine that is not named, and keeps a master copy, it is how much longer a step may take.
    mixed = replace(run, precision="mixed-bf16")
    unnamed = step(spec, mixed, "A100-80GB", roce)
    assert unnamed.data_exposed + unnamed.data_maybe_exposed == pytest.approx(whole.data_exposed, rel=0.1)
    named, either = (lab.estimate(spec, each, "A100-80GB", roce) for each in (replace(mixed, stack="deepspeed"), mixed))
    assert named.step_seconds_high + unnamed.data_maybe_exposed < 1.1 * either.step_seconds_high


@pytest.mark.parametrize("name", ["gpt2", "Llama-3.2-1B", "Qwen3-0.6B", "Qwen3-30B-A3B"])
def test_tensors_that_are_broadcast_are_those_of_transformers(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    spec = lab.model(name)
    config = transformers.AutoConfig.for_model(**spec.config)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    assert tensors(spec, Training()) == len(list(built.parameters()))


def test_what_hides_the_gather_of_a_stage_1():
    """NeMo's overlap_param_gather does, in the next forward; DeepSpeed's ends its update."""
    run = Training(micro_batch=4, seq_len=4096, precision="mixed-bf16", dp=64, zero=1, stack="deepspeed")
    spec = "Llama-3.1-8B"
    stacks = "deepspeed", "megatron:accumulate_allreduce_grads_in_fp32=false"
    deepspeed, megatron = (step(spec, replace(run, stack=name), "H100", H100) for name in stacks)
    gather = kernels("H100").collective("all-gather", 2 * model(spec).parameters, H100.group(64))
    assert deepspeed.data_sent == pytest.approx(megatron.data_sent, rel=0.01)
    assert deepspeed.data_exposed > gather > 3 * megatron.data_exposed


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_copies_sum_one_shard_over_nodes(zero):
    """HSDP: what shards send stays in the node; an all-reduce of a shard's gradients goes between nodes, once. At
    stage 1 all ranks sum whole gradients, in rings through both nodes: as many bytes leave a node."""
    run = replace(SMALL, dp=16, dp_replicate=2, zero=zero, precision="fp32")
    found, inside = (step("Llama-2-7b-hf", each, "H100", H100, overlap=())
                     for each in (run, replace(run, dp=8, dp_replicate=1)))  # fmt: skip
    shard = 4 * model("Llama-2-7b-hf").parameters / 8
    reduced = kernels("H100").collective("all-reduce", shard, H100.group(2, 8))
    assert found.data_sent - inside.data_sent == pytest.approx(reduced, rel=0.4 if zero == 1 else 0.2)


def test_copies_pay_where_nodes_are_slowly_joined():
    run = Training(micro_batch=1, seq_len=4096, precision="mixed-bf16", zero=3, dp=32)
    slow = cluster("H100", "Ethernet-100", adapters=1)
    sharded, hybrid = (step("Llama-2-7b-hf", each, "H100", slow) for each in (run, replace(run, dp_replicate=4)))
    assert hybrid.data_sent < 0.6 * sharded.data_sent and hybrid.seconds < 0.65 * sharded.seconds
    hidden = replace(run, micro_batch=8, dp_replicate=4)
    fast = step("Llama-2-7b-hf", hidden, "H100", H100)
    assert fast.data < 0.7 * fast.data_sent  # copies are summed while backward runs


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


def test_accumulation_with_cut_gradients_sends_them_each_time():
    sent = {
        zero: [step("gpt2", replace(SMALL, dp=8, zero=zero, accumulation=n), "H100", H100).data_sent for n in (1, 4)]
        for zero in (1, 2, 3)
    }
    assert sent[1][1] == pytest.approx(sent[1][0])
    assert sent[2][1] > 2 * sent[2][0]
    assert sent[3][1] == pytest.approx(4 * sent[3][0])


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
