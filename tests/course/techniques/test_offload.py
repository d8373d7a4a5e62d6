"""Offload changes where states are and what is copied, and nothing else: our AdamW, DeepSpeed's and torch's agree."""

import ctypes
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import llmlab as lab
from llmlab.base.errors import NotAvailable, SpecError
from llmlab.course.architectures.gpt import GPT
from llmlab.course.experiments.cpu_adam import cpu_adam, cpu_adam_is_compiled
from llmlab.course.experiments.engines import ADAMW, quiet_deepspeed
from llmlab.course.experiments.job import tiny_gpt
from llmlab.course.experiments.offload import make_job, run_job, with_deepspeed
from llmlab.course.techniques.data_parallel import buckets
from llmlab.course.techniques.offload import InFiles, Offloaded, in_ram
from llmlab.course.techniques.offload_activations import in_files, on_host
from llmlab.course.techniques.precision import MasterWeights
from llmlab.course.techniques.training_loop import next_token_loss
from llmlab.ranks.launch import launch

STEPS = 4
PARAMETERS = tiny_gpt().parameters
pytestmark = pytest.mark.usefixtures("one_thread")


def batch(seed):
    return torch.randint(384, (2, 16), generator=torch.Generator().manual_seed(seed))  # (B, T)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(tiny_gpt()).to(dtype)


def trained_on_the_device(dtype, accumulation):
    gpt = model(dtype)
    masters = MasterWeights(gpt.parameters())
    adam = torch.optim.AdamW(masters.parameters, **ADAMW)
    for step in range(STEPS):
        for i in range(accumulation):
            ids = batch(10 * step + i)
            (next_token_loss(gpt(ids), ids) / accumulation).backward()
        masters.copy_gradients()
        adam.step()
        masters.copy_weights()
        adam.zero_grad()
    return list(gpt.parameters())


def trained_offloaded(dtype, accumulation, memory=in_ram, bucket_bytes=50_000):
    gpt = model(dtype)
    optimizer = Offloaded(gpt.parameters(), bucket_bytes=bucket_bytes, memory=memory, **ADAMW)
    for step in range(STEPS):
        for i in range(accumulation):
            ids = batch(10 * step + i)
            (next_token_loss(gpt(ids), ids) / accumulation).backward()
        assert all(p.grad is None for p in gpt.parameters()), "gradients have left the device"
        optimizer.step()
    return list(gpt.parameters()), optimizer


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(("dtype", "accumulation"), [(torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 1)])
def test_weights_are_those_of_adamw_on_the_device_bit_for_bit(dtype, accumulation):
    weights, _ = trained_offloaded(dtype, accumulation)
    assert equal(weights, trained_on_the_device(dtype, accumulation))


def test_buckets_change_nothing_but_their_number():
    one, few = trained_offloaded(torch.float32, 1, bucket_bytes=10**9), trained_offloaded(torch.float32, 1)
    assert len(one[1].buckets) == 1 and len(few[1].buckets) > 3
    assert equal(one[0], few[0])


def test_states_in_files_are_the_same_states(tmp_path):
    files = InFiles(tmp_path)
    weights, _ = trained_offloaded(torch.bfloat16, 1, files)
    assert equal(weights, trained_offloaded(torch.bfloat16, 1)[0])
    assert sum(path.stat().st_size for path in files.paths) == 12 * PARAMETERS
    assert any(torch.from_file(str(path), size=10).abs().sum() > 0 for path in files.paths)


def test_bytes_that_cross_are_a_gradient_for_each_micro_batch_and_a_weight_for_each_step():
    _, optimizer = trained_offloaded(torch.bfloat16, 3)
    assert optimizer.moved == {"to host": 3 * STEPS * 2 * PARAMETERS, "from host": STEPS * 2 * PARAMETERS}


def test_gradients_of_micro_batches_are_summed_in_fp32_on_the_host():
    """A bf16 sum of 256 and eight ones stays 256: each one is half of bf16's spacing there."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = Offloaded([weight], torch.optim.SGD, lr=1.0)
    for gradient in [256.0] + 8 * [1.0]:
        (weight * gradient).sum().backward()
    optimizer.step()
    assert weight.item() == -264


def test_a_parameter_that_backward_missed_has_no_gradient():
    """A parameter without a gradient gets zero, not the weight that the buffer has since the last step."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Offloaded([used, unused], torch.optim.SGD, lr=0.5)
    for _ in range(2):
        used.sum().backward()
        optimizer.step()
    assert used.tolist() == [0, 0] and unused.tolist() == [1, 1]


def test_buckets_hold_one_dtype_and_at_most_their_bytes():
    sizes = [(10, torch.float32), (10, torch.float32), (30, torch.float32), (5, torch.bfloat16)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes]
    assert [[p.numel() for p in group] for group in buckets(parameters, 80)] == [[10, 10], [30], [5]]
    for given, bucket_bytes in ((parameters, 0), ([], 80)):
        with pytest.raises(SpecError, match=f"bucket_bytes={bucket_bytes} for {len(given)} parameters"):
            Offloaded(given, bucket_bytes=bucket_bytes)


# Does for tensors what ds_adam_step does. DeepSpeed's own build compiles all of torch and pybind11 in each file, which
# takes two minutes.
STEP = """
#include "adam/cpu_adam_impl.cpp"
extern "C" void adam_update(int step, float lr, float beta1, float beta2, float eps, float decay, bool correction,
                            float* weights, float* gradients, float* mean, float* square, size_t n) {
    static Adam_Optimizer adam(lr, beta1, beta2, eps, decay, true);
    adam.IncrementStep(step, beta1, beta2);
    adam.update_state(lr, eps, decay, correction);
    adam.Step_8(weights, gradients, mean, square, n);
}
"""
TENSOR = """#pragma once
#include <ATen/core/Tensor.h>
namespace torch { using namespace at; constexpr auto kFloat32 = at::kFloat; }
"""


def compiled_step(folder):
    """Compile DeepSpeed's loop for this CPU, as DeepSpeed does; return what DeepSpeedCPUAdam calls of its extension."""
    import deepspeed
    from deepspeed.ops.op_builder import CPUAdamBuilder

    (folder / "torch").mkdir()
    (folder / "torch" / "extension.h").write_text(TENSOR)
    (folder / "step.cpp").write_text(STEP)
    source = Path(deepspeed.__file__).parent / "ops" / "csrc"
    torch_folder = Path(torch.__file__).parent
    include = [f"-I{path}" for path in (folder, source, source / "includes", torch_folder / "include")]
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    options = [*CPUAdamBuilder().cxx_args(), "-O1", "-g0"]  # the last of a kind counts: compiled sooner, run once
    command = ["c++", "-std=c++20", "-shared", "-fPIC", *options, *include, "step.cpp", "-o", "step.so", *libraries]
    subprocess.run(command, cwd=folder, check=True)
    update = ctypes.CDLL(str(folder / "step.so")).adam_update
    update.argtypes = [ctypes.c_int, *[ctypes.c_float] * 5, ctypes.c_bool, *[ctypes.c_void_p] * 4, ctypes.c_size_t]

    def adam_update(_, *numbers_and_tensors):
        numbers, tensors = numbers_and_tensors[:7], numbers_and_tensors[7:]
        update(*numbers, *(t.data_ptr() for t in tensors), tensors[0].numel())

    return SimpleNamespace(create_adam=lambda *_: None, adam_update=adam_update, destroy_adam=lambda _: None)


def both_adams(folder):
    """Run in a rank: how far apart the two are, in units of one fp32 rounding per step, and how far they moved."""
    quiet_deepspeed()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    extension = compiled_step(Path(folder))
    CPUAdamBuilder.load = lambda self: extension
    n, steps = 10_007, 10  # not a multiple of a vector register
    start = torch.linspace(-3, 3, n)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {**ADAMW, "lr": 1e-2}
    adamw, cpu = torch.optim.AdamW([ours], **options), cpu_adam()([theirs], **options)
    for step in range(steps):
        gradient = torch.randn(n, generator=torch.Generator().manual_seed(step))
        ours.grad, theirs.grad = gradient, gradient.clone()
        adamw.step()
        cpu.step()
    rounding = torch.finfo(torch.float32).eps * start.abs().clamp(min=1)
    off = (ours - theirs).abs() / rounding / steps
    return {"off": off.max().item(), "went": (ours - start).abs().median().item(), "kind": type(cpu).__name__}


def test_deepspeeds_cpu_adam_is_torchs_adamw(tmp_path):
    """The same formula, in another order of operations."""
    pytest.importorskip("deepspeed", reason="the distributed extra")
    found = launch(both_adams, 1, str(tmp_path), patience=120)[0]
    assert found["kind"] == "DeepSpeedCPUAdam" and found["off"] <= 1
    assert found["went"] > 0.01


def test_a_compilation_that_was_killed_is_said_not_waited_for(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed", reason="the distributed extra")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    for left in ("cpu_adam.so", "lock"):
        (tmp_path / "cpu_adam" / left).touch()
    with pytest.raises(NotAvailable, match=r"killed: then delete .*lock"):
        cpu_adam()
    assert not cpu_adam_is_compiled()


HERE = Path(torch.__file__).parent


@pytest.mark.parametrize(
    ("environment", "built", "compiled"), [(HERE, 2e10, True), ("/another/torch", 2e10, False), (HERE, 0, False)]
)
def test_a_build_of_another_or_older_environment_would_be_compiled_again(
    tmp_path, monkeypatch, environment, built, compiled
):
    pytest.importorskip("deepspeed", reason="the distributed extra")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    os.utime(tmp_path / "cpu_adam" / "cpu_adam.so", (built, built))
    (tmp_path / "cpu_adam" / "build.ninja").write_text(f"cflags = -isystem {environment}/include -O3")
    assert cpu_adam_is_compiled() is compiled


def test_deepspeed_offloads_what_the_training_says_and_gives_the_same_losses():
    pytest.importorskip("deepspeed", reason="the distributed extra")
    job = make_job("deepspeed", steps=STEPS, accumulation=2)
    ranks = launch(with_deepspeed, 2, job, patience=120)
    plain = run_job(make_job("torch", steps=STEPS, accumulation=2))
    for rank in ranks:
        assert max(abs(a - b) for a, b in zip(rank["losses"], plain["losses"], strict=True)) < 2e-5
        assert rank["stage"] == 3 and rank["offloads"] == {"offload_param": "cpu", "offload_optimizer": "cpu"}
        assert rank["device"]["weights"] == 0  # between steps no parameter is whole
        assert rank["host"] == {"weights": 4 * PARAMETERS // 2, "states": 12 * PARAMETERS // 2}


def test_one_gpu_may_offload_what_zero_would_cut():
    """ZeRO-Offload's own case: stage 2 on one GPU."""
    config = lab.Training(zero=2, offload="optimizer", precision="mixed-fp16").to_deepspeed()["zero_optimization"]
    assert config["stage"] == 2 and config["offload_optimizer"]["device"] == "cpu" and "offload_param" not in config
    both = lab.Training(zero=3, offload="optimizer+parameters").to_deepspeed()["zero_optimization"]
    assert both["offload_param"]["device"] == both["offload_optimizer"]["device"] == "cpu"
    with pytest.raises(SpecError, match=r"zero=2 .*dp=1"):
        lab.Training(zero=2)


def gradients(around):
    gpt, ids = model(), batch(0)
    with around(gpt) as context:
        loss = next_token_loss(gpt(ids), ids)
    loss.backward()
    return [p.grad for p in gpt.parameters()], context


def test_activations_that_went_elsewhere_give_the_same_gradients(tmp_path):
    from contextlib import nullcontext

    contexts = {}

    def offloaded(name, make):
        def around(gpt):
            contexts[name] = make(list(gpt.parameters()))
            return contexts[name]

        return gradients(around)[0]

    plain, _ = gradients(lambda gpt: nullcontext())
    assert equal(plain, offloaded("host", on_host))
    assert equal(plain, offloaded("files", lambda weights: in_files(tmp_path, weights)))
    for context in contexts.values():
        assert context.moved["left"] == context.moved["returned"] > 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > contexts["files"].moved["left"]


def test_weights_stay_where_they_are(tmp_path):
    layer, x = nn.Linear(64, 64, bias=False), torch.ones(2, 64, requires_grad=True)
    context = on_host(layer.parameters())
    with context:
        y = layer(x)
    assert context.moved["left"] == x.nbytes  # torch's save_on_cpu would send the weight as well
    y.sum().backward()


@pytest.mark.parametrize(("engine", "place"), [("torch", "device"), ("scratch", "host"), ("files", "files")])
def test_each_engine_has_the_states_in_its_place(engine, place):
    result = run_job(make_job(engine, precision="mixed-bf16", steps=1))
    assert len(result["losses"]) == 1 and result["device"]["weights"] == 2 * PARAMETERS
    assert result[place]["states"] == 12 * PARAMETERS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"engine": "gpu"}, "engine='gpu' is not one of torch, scratch"),
        ({"engine": "scratch", "precision": "fp16"}, "precision='fp16' is not one of fp32, mixed-bf16"),
        ({"engine": "scratch", "steps": 0}, "steps=0"),
        ({"engine": "deepspeed", "sequences": 3}, "sequences=3"),
    ],
)
def test_a_job_that_cannot_run_is_refused(arguments, words):
    with pytest.raises(SpecError, match=words):
        make_job(**arguments)


@pytest.mark.filterwarnings("ignore:a copy to the host")  # fake tensors have no values to copy
def test_on_a_gpu_copies_have_a_stream_and_only_weights_stay():
    """On a simulated one: the code for CUDA, pinned memory, streams and events included."""
    with lab.simulator("A100-80GB") as sim:
        layer = nn.Linear(2048, 2048, bias=False).to("cuda")  # 16 MiB of weights
        optimizer = Offloaded(layer.parameters(), lr=1e-3)
        assert optimizer.stream is not None and optimizer.buckets[0].copied is not None
        held = []
        for _ in range(2):
            layer(torch.ones(2, 2048, device="cuda")).sum().backward()
            optimizer.step()
            held.append(sim.allocated)
        workspaces = 2 * lab.gpu("A100-80GB").cublas_workspace
        assert held == [16 * 2**20 + workspaces] * 2  # neither gradient nor master copy nor moments
