"""lab.serve with llama.cpp: its buffers as logs show them, its speed as others measured it, and a real server."""

import os
import re
import shlex
import shutil
import socket
import subprocess

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from llmlab.archive import figure
from llmlab.base.errors import SpecError, UnknownName
from llmlab.cli.main import cli
from llmlab.serving.launch import launch_line
from llmlab.serving.llamacpp import buffers, compute_bytes, slot_tokens
from llmlab.serving.sizing import frontier, longest_context
from llmlab.serving.step import Step, step_seconds
from llmlab.specs.gguf import MIXES, stored
from llmlab.specs.model import model

LLAMA = model("meta-llama/Llama-3.1-8B")
T4 = lab.gpu("T4")
MIB = 2**20


def service(**fields):
    return lab.Service(engine="llama.cpp", **{"weights": "q4_k_m", **fields})


def test_model_and_cache_have_the_sizes_that_llama_cpp_logged():
    """Llama-3-8B on an M1 (XiongjieDai/GPU-Benchmarks-on-LLM-Inference, LLaMA 3/Mac/M1_8GB.ipynb)."""
    logged = buffers(LLAMA, service(max_model_len=512, n_gpu_layers=33), T4)
    assert logged.model[0] / MIB == pytest.approx(4403.50, abs=0.01)
    assert logged.model[1] / MIB == pytest.approx(281.81, abs=0.01)
    assert logged.kv == (64 * MIB, 0)


def test_the_last_layers_are_on_the_gpu():
    """Mistral-7B with 20 of its layers there: 2495.31 MiB, of a release that left the output layer to the CPU."""
    spec = model("mistralai/Mistral-7B-v0.3")
    output = next(tensor.bytes for tensor in stored(spec, "Q4_K_M") if tensor.name == "output")
    assert (buffers(spec, service(n_gpu_layers=21), T4).model[0] - output) / MIB == pytest.approx(2495.31, abs=0.03)


def test_layers_with_a_window_cache_little():
    """gpt-oss-20b with 131,072 tokens: 3072 MiB for twelve layers, 18 MiB for the twelve with a window of 128."""
    spec = model("gpt-oss-20b")
    assert sum(buffers(spec, service(weights="mxfp4", max_model_len=131_072), T4).kv) == 3090 * MIB


# What sched_reserve logs on a device other than the CPU, for models of these sizes, in Q4_K, with one slot of 4,096
RESERVED = {
    "meta-llama/Llama-3.1-8B": (112.01, 20.01), "Qwen/Qwen3-8B": (100.01, 20.01), "Qwen/Qwen3-32B": (190.01, 24.01),
    "Qwen/Qwen3-0.6B": (30.01, 8.01), "Qwen/Qwen3-30B-A3B": (88.01, 12.01),
}  # fmt: skip


@pytest.mark.parametrize("name", RESERVED)
def test_compute_buffers_have_the_sizes_that_llama_cpp_reserved(name):
    spec = model(name)
    ours = buffers(spec, service(max_model_len=4096, n_gpu_layers=spec.layers + 1), lab.gpu("H200"))
    assert [size / MIB for size in ours.compute] == pytest.approx(RESERVED[name], rel=0.005)


@pytest.mark.parametrize(("kv", "mebibytes"), [("f16", 1024), ("q8_0", 544), ("q4_0", 288), ("f32", 2048)])
def test_cache_types(kv, mebibytes):
    assert sum(buffers(LLAMA, service(kv=kv, max_model_len=8192), T4).kv) == mebibytes * MIB


@settings(deadline=None)
@given(st.sampled_from(["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B"]),
       st.sampled_from(list(MIXES)), st.integers(0, 16))  # fmt: skip
def test_more_layers_on_the_gpu_take_more_of_it_and_less_of_the_cpu(name, mix, count):
    spec = model(name)
    few, more = (buffers(spec, service(weights=mix.lower(), n_gpu_layers=n), T4) for n in (count, count + 1))
    assert few.model[0] < more.model[0] and few.kv[0] <= more.kv[0]
    assert few.model[1] > more.model[1] or (spec.tied and count == 0)
    twice = next(tensor.bytes for tensor in stored(spec, mix) if tensor.name == "output") if spec.tied else 0
    assert sum(few.model) + (twice if count == 0 else 0) == pytest.approx(sum(more.model), abs=64)
    assert sum(few.kv) == sum(more.kv)


def test_without_n_gpu_layers_as_many_are_on_the_gpu_as_fit():
    spec = model("meta-llama/Llama-3.1-70B")
    most = buffers(spec, service(), lab.gpu("RTX-4090"))
    assert 0 < most.offloaded < most.layers
    one_more = buffers(spec, service(n_gpu_layers=most.offloaded + 1), lab.gpu("RTX-4090"))
    assert most.missing <= -(2**30) < one_more.missing, "--fit leaves a GiB"
    assert buffers(LLAMA, service(), lab.gpu("RTX-4090")).offloaded == 33


def speed(spec, weights, gpu, **fields):
    """Tokens per second of llama-bench, which does not sample."""
    parts = step_seconds(spec, service(weights=weights, n_gpu_layers=spec.layers + 1, **fields), gpu, Step(1, 64))
    return 1 / (sum(parts.values()) - parts["sampling"])


DATA_CENTER = ("A100-80GB", "H100-80GB")  # 26 % too fast: a single token's kernels do not reach their bandwidth


@pytest.mark.parametrize("gpu", figure("llama-bench-cuda").values)
def test_decoding_is_as_fast_as_others_measured(gpu):
    predicted = speed(model("meta-llama/Llama-2-7b-hf"), "q4_0", lab.gpu(gpu))
    rel = 0.3 if gpu in DATA_CENTER else 0.2
    assert predicted == pytest.approx(figure("llama-bench-cuda")[gpu], rel=rel)


@pytest.mark.parametrize("row", figure("llama-bench-llama-3-8b").values)
def test_other_weights_are_as_fast_as_others_measured(row):
    gpu, weights = row.split(", ")
    predicted = speed(LLAMA, weights.lower(), lab.gpu(gpu))
    assert predicted == pytest.approx(figure("llama-bench-llama-3-8b")[row], rel=0.22)


@pytest.mark.parametrize("row", figure("llama-bench-apple").values)
def test_a_mac_decodes_at_the_bandwidth_of_its_memory(row):
    spec, bandwidth = model("meta-llama/Llama-2-7b-hf"), float(row.split(", ")[1])
    parts = step_seconds(spec, service(weights="q4_0", n_gpu_layers=0, cpu_memory_gb_s=bandwidth), T4, Step(1, 64))
    assert 1 / sum(parts.values()) == pytest.approx(figure("llama-bench-apple")[row], rel=0.06)


@pytest.mark.parametrize("gpu", figure("llama-bench-cuda-prompt").values)
def test_prompts_are_read_as_fast_as_others_measured(gpu):
    spec = model("meta-llama/Llama-2-7b-hf")
    parts = step_seconds(spec, service(weights="q4_0", n_gpu_layers=33), lab.gpu(gpu), Step(0, 1, 512))
    rel = 0.4 if gpu in DATA_CENTER else 0.2
    assert 512 / sum(parts.values()) == pytest.approx(figure("llama-bench-cuda-prompt")[gpu], rel=rel)


def test_a_mixture_is_as_fast_as_others_measured():
    """gpt-oss-20b on an RTX 4090: 222 to 225 tokens/s (llama.cpp, discussion 15396)."""
    assert speed(model("gpt-oss-20b"), "mxfp4", lab.gpu("RTX-4090")) == pytest.approx(223, rel=0.1)


def test_layers_on_the_cpu_are_slow_by_its_bandwidth():
    spec = model("meta-llama/Llama-3.1-70B")
    slow, fast = (lab.serve(spec, service(cpu_memory_gb_s=rate), "RTX-4090") for rate in (50, 100))
    assert "layers-on-the-cpu" in [note.code for note in slow.notes]
    saved = slow.latency.tpot - fast.latency.tpot
    assert saved == pytest.approx(fast.time["layers on the CPU"], rel=0.05)


def test_prompts_cost_nothing_where_they_make_steps_shorter():
    """With layers on a slow CPU, whose weights a prompt sends to the GPU once for all of its tokens."""
    slow = lab.Service("llama.cpp", n_gpu_layers=0, cpu_memory_gb_s=1.0, concurrency=4)
    report = lab.serve("Qwen/Qwen2.5-1.5B", slow, "RTX-PRO-6000")
    assert report.usd_per_million_input == 0 < report.usd_per_million_output


def test_more_slots_share_the_gpu():
    points = frontier(LLAMA, service(), lab.gpu("RTX-3090"), users=(1, 2, 4))
    assert [point.users for point in points] == [1, 2, 4]
    assert points[0].tokens_per_second < points[1].tokens_per_second < points[2].tokens_per_second


def test_longest_context_fits_and_no_longer_one():
    card = lab.gpu("RTX-3060")
    tokens = longest_context(LLAMA, service(), card, 2)
    fits, not_ = (
        buffers(LLAMA, service(n_gpu_layers=33, max_num_seqs=2, max_model_len=length), card)
        for length in (tokens, tokens + 256)
    )
    assert fits.requests == 2 and not_.requests == 0


def test_what_does_not_fit_says_how_many_layers_do():
    report = lab.serve("meta-llama/Llama-3.1-70B", service(n_gpu_layers=81), "RTX-4090")
    assert report.outcome == "out of memory"
    fits = next(note for note in report.notes if note.code == "fits-with")
    count = int(re.search(r"n_gpu_layers=(\d+)", str(fits))[1])
    assert lab.serve("meta-llama/Llama-3.1-70B", service(n_gpu_layers=count), "RTX-4090").outcome == "fits"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"weights": "q4_k_x"}, UnknownName, "Nearest: Q4_K_"),
        ({"weights": "fp8"}, UnknownName, "unknown GGUF type 'fp8'"),
        ({"kv": "q8"}, UnknownName, "Nearest: q8_0"),
        ({"n_gpu_layers": 99}, SpecError, "32 layers and the output layer; give 0 to 33"),
        ({"n_gpu_layers": -1}, SpecError, "give a whole number >= 0"),
        ({"cpu_memory_gb_s": 0.0}, SpecError, "cpu_memory_gb_s=0.0"),
        ({"tp": 2, "dp_attention": 2}, SpecError, "not options of llama.cpp"),
        ({"engine": "vllm"}, SpecError, "'q4_k_m': give one of .* or engine=\"llama.cpp\""),
        ({"engine": "vllm", "weights": "bf16", "n_gpu_layers": 8}, SpecError, 'option of engine="llama.cpp"'),
        ({"max_model_len": 200_000}, SpecError, "has 131072 positions"),
    ],
)
def test_what_cannot_be_served_is_refused(fields, error, message):
    with pytest.raises(error, match=message):
        lab.serve(LLAMA, lab.Service(**{"engine": "llama.cpp", "weights": "q4_k_m", **fields}), "RTX-4090")


def test_a_model_that_llama_cpp_stores_in_a_way_not_known_is_refused():
    with pytest.raises(SpecError, match="other layers than attention"):
        lab.serve("Qwen/Qwen3-Next-80B-A3B-Instruct", service(), "H200")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--gpu", "RTX-3060"], 0, "33/33"),
        (["--gpu", "RTX-3060", "--launch", "--kv", "q8_0"], 0, "--cache-type-v q8_0"),
        (["--gpu", "RTX-3060", "--users", "2"], 0, "tokens with all layers"),
        (["--gpu", "2xRTX-3060", "--frontier"], 0, "tokens/s per user"),
        (["--gpu", "RTX-4090", "--slo", "ttft=2s,tpot=30ms", "--rate", "1"], 0, "RTX-4090"),
        (["--gpu", "RTX-3060", "--json"], 0, '"offloaded": 33'),
        (["--gpu", "RTX-3060", "--weights", "q9_k"], 2, "unknown GGUF type"),
    ],
)
def test_the_command(options, code, words):
    options = ["serve", "meta-llama/Llama-3.1-8B", "--engine", "llama.cpp", "--weights", "q4_k_m", *options]
    result = CliRunner().invoke(cli, options)
    assert result.exit_code == code
    assert words in result.output


# ---- a real server

SERVER = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
SIZE = re.compile(r"(model|KV|compute) buffer size = +([\d.]+) MiB")


def log_of(arguments):
    """Start llama-server, and return the lines of its log until it listens."""
    lines = []
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            lines.append(line)
            if "listening on" in line:
                break
        process.kill()
    return "".join(lines)


@pytest.mark.skipif(SERVER is None, reason="llama-server is not on PATH; LLAMA_SERVER may name it")
@pytest.mark.parametrize("fields", [
    {"prompt_len": 128, "output_len": 128}, {"prompt_len": 700, "output_len": 300, "max_num_seqs": 4, "kv": "q8_0"},
], ids=["one slot", "four slots"])  # fmt: skip
def test_a_real_servers_log(tmp_path, monkeypatch, fields):
    """The launch line starts llama-server, on the CPU; its log names the sizes that we predict."""
    from llmlab.course.architectures.small import small_model, small_tokenizer
    from llmlab.course.quantize.formats.gguf_model import write_llama

    network = small_model()
    spec, fields = network.spec, service(weights="q8_0", n_gpu_layers=0, **fields)
    line = shlex.split(launch_line("small", fields))
    write_llama(tmp_path / line[line.index("--model") + 1], network, small_tokenizer(), "Q8_0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.chdir(tmp_path)
    # --no-repack: else the CPU's kernels have the weights once more, in an order of their own
    more = ["--port", str(port), "--verbosity", "4", "--no-repack", "--no-warmup", "--device", "none"]
    sizes = {"model": 0.0, "KV": 0.0, "compute": 0.0}
    for name, size in SIZE.findall(log_of([SERVER, *line[1:], *more])):
        sizes[name] += float(size)
    ours, layer = buffers(spec, fields, T4), compute_bytes(spec, fields)[1]
    residual = 4 * min(512, fields.slots * slot_tokens(fields)) * spec.hidden
    assert sizes["model"] == pytest.approx(ours.model[1] / MIB, abs=0.02)
    assert sizes["KV"] == pytest.approx(ours.kv[1] / MIB, abs=0.01)
    assert sizes["compute"] == pytest.approx((layer + residual) / MIB, rel=0.02)


def test_from_32_rows_on_layers_of_the_cpu_run_on_the_gpu():
    """ggml-cuda.cu, offload_op: below, their weights are read by the CPU; from there on they are sent over PCIe."""
    service = lab.Service("llama.cpp", weights="q4_k_m", n_gpu_layers=0, cpu_memory_gb_s=50)
    card = lab.gpu("RTX-4090")
    few, many = (step_seconds(model("meta-llama/Llama-3.1-8B"), service, card, Step(rows, 100)) for rows in (31, 32))
    assert few["layers on the CPU"] / many["layers on the CPU"] == pytest.approx(card.pcie / 50e9, rel=0.35)
    assert many["small kernels"] > few["small kernels"]
