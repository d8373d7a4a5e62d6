"""`llmlab run`: small training scripts as people write them, through the command line."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import llmlab as lab  # noqa: E402
from llmlab.base.units import show_bytes  # noqa: E402
from llmlab.cli import main as cli  # noqa: E402


def run(*words):
    return CliRunner().invoke(cli.cli, ["run", *map(str, words)])


def answer(*words):
    result = run("--json", *words)
    assert result.exit_code in (0, 1), (result.stderr, result.exception)
    return json.loads(result.stdout)


def codes(found):
    return [note["code"] for note in found["notes"]]


def test_the_peaks_are_those_of_the_simulator_and_the_parts_add_up(script):
    name = script("for i in range(3): step()")
    found = answer("--gpu", "T4", name)
    with lab.simulator("T4") as sim:
        runpy.run_path(name)
    assert (sim.peak_allocated, sim.peak_reserved) == (found["peak_allocated"], found["peak_reserved"])
    assert sum(found["by_category"].values()) == found["peak_allocated"]
    assert sum(sum(sizes.values()) for sizes in found["by_module"].values()) == found["peak_allocated"]
    assert (found["outcome"], found["steps"], found["ended"]) == ("fits", 3, "ran to its end")
    card = lab.gpu("T4")
    assert found["process"] == found["peak_reserved"] + card.outside()
    assert found["step_seconds_low"] < found["step_seconds"] < found["step_seconds_high"]


def test_the_host_has_the_weights_before_they_move_and_copies_of_them_later(script):
    weights = 4 * (2 * 256 * 1024 + 1024 + 256)
    found = answer("--gpu", "T4", name := script("step()"))
    assert (found["host_peak"], found["host_lines"]) == (weights, {f"{name}:4": weights})
    found = answer("--gpu", "T4", script("step()\nkept = [{k: v.cpu() for k, v in model.state_dict().items()}\n"
                                         "        for epoch in range(3)]"))  # fmt: skip
    assert found["host_peak"] == 3 * weights and list(found["host_lines"].values()) == [3 * weights]
    assert f"created by {next(iter(found['host_lines']))}" in run("--gpu", "T4", name).stdout


@pytest.mark.parametrize(
    "loop",
    [
        "while True: step()",
        "while True:\n    try: step()\n    except Exception: pass",
        "from itertools import count\nfor _ in count(): step()",
        "try:\n    while True: step()\nexcept: step()",
    ],
)
def test_steps_end_any_loop(script, loop):
    found = answer("--gpu", "A100-40GB", "--steps", 2, script(loop))
    assert found["ended"] == f"was ended after {found['steps']} optimizer steps" and found["steps"] in (2, 3)


def test_a_script_gets_its_arguments_and_modules_beside_it(script):
    Path("helper.py").write_text("HIDDEN = 3")
    name = script("import helper\nassert sys.argv == ['train.py', '--json', '--gpu', 'x'], sys.argv\nstep()")
    assert answer("--gpu", "A100-40GB", name, "--json", "--gpu", "x")["command"] == "train.py --json --gpu x"


def test_its_output_makes_room_for_json(script):
    name = script("print('loss', step().item())")
    assert "loss ?" in run("--gpu", "A100-40GB", name).stdout
    result = run("--gpu", "A100-40GB", "--json", name)
    assert json.loads(result.stdout)["steps"] == 1 and "loss ?" in result.stderr


def test_its_output_stays_on_stdout_whatever_colours_are_asked_for(script, monkeypatch):
    """Jupyter sets FORCE_COLOR, and rich then takes a pipe for a terminal, whose output a progress line redirects."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "hello" in run("--gpu", "T4", script("print('hello')")).stdout


def test_files_are_thrown_away_or_kept(script, tmp_path):
    body = "step(); os.makedirs('out'); open('out/log', 'w').write('x'); torch.save(model.state_dict(), 'out/model.pt')"
    name = script(body + "; assert os.path.exists('out/model.pt'); model.load_state_dict(torch.load('out/model.pt'))")
    answer("--gpu", "A100-40GB", name)
    assert os.listdir(".") == ["train.py"]
    answer("--gpu", "A100-40GB", "--out", tmp_path / "kept", name)
    assert os.listdir(".") == ["train.py"]
    assert [path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()] == ["log"]


def test_what_does_not_fit_says_where_and_what_it_would_have_taken(script):
    name = script("for _ in range(3): step()\nbig = torch.empty(50 << 30, dtype=torch.uint8, device='cuda')\nstep()")
    result = run("--json", "--gpu", "A40", name)
    data = json.loads(result.stdout)
    assert (result.exit_code, data["outcome"], data["steps"]) == (1, "out of memory", 3)
    assert data["where"].startswith("empty.memory_format, ")
    assert 50 << 30 < data["needed"] < 51 << 30  # also of a GPU whose context nobody measured
    assert data["peak_allocated"] < 1 << 30


def test_one_that_ends_itself_for_want_of_memory_does_not_fit(script, monkeypatch):
    monkeypatch.setattr("llmlab.cli.run._needed", lambda *_: 1 << 40)  # another process would find it
    big = "torch.empty(50 << 30, dtype=torch.uint8, device='cuda')"
    name = script(f"try: {big}\nexcept torch.OutOfMemoryError: sys.exit(1)")
    result = run("--json", "--gpu", "A40", name)
    found = json.loads(result.stdout)
    assert (result.exit_code, found["outcome"], found["needed"]) == (1, "out of memory", 1 << 40)


def test_a_limit_is_of_the_whole_process(script):
    name = script("step()")
    taken = answer("--gpu", "T4", name)["process"] / 2**30
    assert run("--gpu", "T4", "--max-gib", taken + 0.001, name).exit_code == 0
    result = run("--gpu", "T4", "--max-gib", taken - 0.001, "--json", name)
    assert result.exit_code == 1 and json.loads(result.stdout)["needed"] == round(taken * 2**30)
    limit = show_bytes(round((taken - 0.001) * 2**30))  # the run ended, so the outcome says what it exceeds
    shown = run("--gpu", "T4", "--max-gib", taken - 0.001, name).stdout.splitlines()
    assert next(line for line in shown if line.strip().startswith("outcome")).endswith(limit)


def test_a_sign_for_an_unknown_value_is_explained_where_it_was_printed(script):
    assert "unknown-printed" in codes(answer("--gpu", "T4", script("print(step())")))
    assert "unknown-printed" in codes(answer("--gpu", "T4", script("print(f'{step().item():.3f}')")))
    assert "unknown-printed" not in codes(answer("--gpu", "T4", script("step()")))


def test_one_that_catches_the_error_goes_on_and_is_told_of(script):
    body = "try: torch.empty(17 << 30, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass\nstep()"
    found = answer("--gpu", "T4", script(body))
    assert found["outcome"] == "fits" and codes(found) == ["caught-out-of-memory"]


def test_one_that_fails_by_itself_shows_its_own_lines_only(script):
    result = run("--gpu", "T4", script("def inner():\n    return 1 / 0\ninner()"))
    assert result.exit_code == 2 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-2:] == [
        "ZeroDivisionError: division by zero", "llmlab: the script failed with an error of its own",
    ]  # fmt: skip
    assert [line for line in lines if "File" in line and "train.py" not in line] == []


def test_a_compiled_script_has_the_time_of_its_fused_kernels(script):
    found = answer("--gpu", "A100-40GB", script(
        "torch.compile(lambda x: x.exp() + 1)(torch.ones(8, device='cuda')); model.compile(); step()"
    ))  # fmt: skip
    assert not codes(found)
    assert 0 < found["step_seconds_low"] < found["step_seconds"] < found["step_seconds_high"]


def test_compiled_code_may_ask_for_autocast_after_the_ranks_have_met(script):
    """init_process_group lets Dynamo forget its rules, those of what answers for the GPU too."""
    pytest.importorskip("triton")
    body = """
from torch.utils.checkpoint import checkpoint
torch.distributed.init_process_group("nccl")
def scaled(x):
    return x * 2 if torch.is_autocast_enabled() else x + 1
run = torch.compile(lambda x: checkpoint(scaled, x, use_reentrant=False).sum(), fullgraph=True)
run(torch.ones(4, 4, device="cuda", requires_grad=True)).backward()
step()
"""
    found = answer("--gpu", "H100", "torchrun", "--nproc_per_node=2", script(body))
    assert found["outcome"] == "fits" and "ran-eager" not in codes(found), found["notes"]


def test_a_library_that_is_imported_later_does_not_hide_triton(script, tmp_path):
    """The GPU is hidden from it while it is imported, and torch keeps the first answer to has_triton()."""
    pytest.importorskip("triton")
    (tmp_path / "home" / "apex.py").write_text("from torch.utils._triton import has_triton\nFOUND = has_triton()")
    body = """
x = torch.ones(8, device="cuda")
torch.compile(lambda x: x.exp() + 1)(x)
torch.utils._triton.has_triton.cache_clear()
import apex
torch.compile(lambda x: x.sin() + 1)(x)
assert not apex.FOUND
step()
"""
    found = answer("--gpu", "H100", script(body))
    assert "ran-eager" not in codes(found), found["notes"]


def test_a_compiled_block_under_context_parallelism_stays_compiled(script):
    pytest.importorskip("triton")
    body = """
from torch.distributed.tensor.experimental import context_parallel
torch.distributed.init_process_group("nccl")
mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(64, 64)
    def forward(self, x):
        q = self.q(x)[:, None]
        return x + nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
block = Block().cuda().bfloat16()
block.compile(fullgraph=True)
x = torch.ones(1, 256, 64, device="cuda", dtype=torch.bfloat16)
with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
    block(x).sum().backward()
step()
"""
    found = answer("--gpu", "H100", "torchrun", "--nproc_per_node=2", script(body))
    assert found["outcome"] == "fits" and "ran-eager" not in codes(found), found["notes"]


def test_products_of_dtypes_that_no_card_was_measured_with_run(script):
    body = """
weight = torch.ones(64, 64, device="cuda", dtype=torch.float64, requires_grad=True)
for optimizer in [torch.optim.SGD([weight])] * 2:
    (weight @ weight).sum().backward(); optimizer.step()
"""
    found = answer("--gpu", "H100-80GB", script(body))
    assert (found["outcome"], found["steps"], found["step_seconds"]) == ("fits", 2, None)
    assert codes(found) == ["time-unknown"] and "float64" in found["notes"][0]["text"]


def test_exit_codes_of_its_own(script):
    assert answer("--gpu", "T4", script("step(); sys.exit(0)"))["ended"] == "ran to its end"
    result = run("--gpu", "T4", script("step(); sys.exit(3)"))
    assert result.exit_code == 2 and "sys.exit(3)" in result.stderr


def test_what_the_script_caught_before_it_ended_itself_is_what_ended_it(script):
    """Hydra and their like show an error and exit."""
    body = "try: torch.randn(4, device='cuda').nonzero()\nexcept Exception: sys.exit(1)"
    result = run("--gpu", "T4", script(body))
    assert result.exit_code == 2 and "nonzero" in result.stderr and "(train.py, line 11)" in result.stderr
    result = run("--gpu", "T4", script("try: 1 / 0\nexcept Exception: sys.exit(1)"))
    assert result.exit_code == 2 and "ZeroDivisionError" in result.stderr


def test_a_refusal_that_the_script_caught_is_told(script):
    body = "try: torch.randn(4, device='cuda').nonzero()\nexcept Exception: pass\n"
    found = answer("--gpu", "A100-40GB", script(body + "step()"))
    assert found["outcome"] == "fits" and codes(found) == ["caught-refusal"]
    assert "(train.py, line 11)" in found["notes"][0]["text"]
    result = run("--gpu", "T4", "--json", script(body))
    assert result.exit_code == 2 and json.loads(result.stdout)["outcome"] == "unknown"  # nothing was trained


@pytest.mark.parametrize("caught", [
    "import os\ntry:\n    torch.cuda.CUDAGraph()\nexcept RuntimeError:\n    pass\n",
    "import threading\ndef wait():\n    try: torch.cuda.synchronize()\n    except ValueError: pass\n"
    "thread = threading.Thread(target=wait)\nthread.start()\nthread.join()\n",
])  # fmt: skip
def test_a_failure_after_a_caught_error_of_the_simulation_is_explained_by_it(script, caught):
    """As in transformers' continuous batching, whose thread fails and leaves no completions."""
    result = run("--gpu", "T4", script(f"{caught}[][-1]"))
    assert result.exit_code == 2 and "failed with an error of its own" not in result.stderr
    assert ("CUDA graphs" in result.stderr) or ("in a second thread" in result.stderr)
    assert "failed with IndexError: list index out of range" in result.stderr


def test_training_in_a_second_thread_is_refused_once(script):
    start = "import threading\nthread = threading.Thread(target=step)\nthread.start()\nthread.join()\n"
    result = run("--gpu", "T4", script(start))
    assert result.exit_code == 2 and "Traceback" not in result.output and "main thread" in result.stdout
    pool = "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor().submit(step).result()"
    result = run("--gpu", "T4", script(pool))
    assert result.exit_code == 2 and result.stderr.count("in a second thread") == 1


def test_what_comes_after_the_last_step_is_no_longer_the_run_s(script):
    body = "try:\n    while True: step()\nfinally: 1 / 0"
    assert answer("--gpu", "A100-40GB", "--steps", 1, script(body))["steps"] == 1


def test_products_may_name_the_dtype_of_their_result(script):
    body = """
half, total = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16), torch.randn(64, 64, device="cuda")
torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
assert torch.mm(half, half, out_dtype=torch.float32).dtype == torch.float32
step()
"""
    assert answer("--gpu", "A100-40GB", script(body))["steps"] == 1


def test_one_rank_of_a_launcher_is_a_group(script):
    body = "import torch.distributed as dist\ndist.init_process_group('nccl')\nprint(dist.get_world_size())\nstep()"
    name = script(body)
    result = run("--gpu", "A100-40GB", "torchrun", "--nproc_per_node", 1, name)
    assert result.exit_code == 0 and result.stdout.startswith("1\n"), result.stderr
    result = run("--gpu", "A100-40GB", name)
    assert result.exit_code == 2 and "--world-size" in result.stderr


def alone(*words):
    """Run in a process of its own."""
    line = [sys.executable, "-m", "llmlab", "run", "--json", "--gpu", "A100-40GB", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)


def test_a_script_that_catches_everything_is_ended(script):
    done = alone("--steps", "1", script("while True:\n    try: step()\n    except: pass"))
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == 21


def test_an_interrupt_shows_the_peak_so_far(script):
    result = run("--gpu", "A100-40GB", "--json", script("step(); raise KeyboardInterrupt"))
    found = json.loads(result.stdout)
    assert (result.exit_code, found["outcome"], found["steps"]) == (2, "unknown", 1)
    assert found["ended"] == "was interrupted" and found["peak_allocated"] > 0


def test_what_is_not_simulated_is_one_line(script):
    result = run("--gpu", "T4", script("torch.randn(4, device='cuda').nonzero()"))
    assert result.exit_code == 2 and "(train.py, line 11)" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_launcher_or_an_option_says_the_ranks(script):
    body = "import torch.distributed as dist\ndist.init_process_group('nccl')\nprint(dist.get_world_size())\nstep()"
    name = script(body)
    assert answer("--gpu", "A100-40GB", "torchrun", "--nproc_per_node", 4, name)["world_size"] == 4
    result = run("--gpu", "A100-40GB", "--nodes", 2, name)
    assert result.exit_code == 0 and result.stdout.startswith("16\n") and "rank 0 of 16" in result.stdout


def test_a_snapshot_and_a_picture(script, tmp_path):
    pytest.importorskip("matplotlib")
    snapshot, picture = tmp_path / "run.pickle", tmp_path / "run.png"
    answer("--gpu", "A100-40GB", "--snapshot", snapshot, "--timeline", picture, script("step()"))
    assert snapshot.stat().st_size > 1000 and picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "nowhere.py does not exist"),
        ([], "no script"),
        (["--gpu", "T5", "train.py"], "unknown GPU"),
        (["--steps", "0", "train.py"], "--steps 0 is not a whole number"),
        (["--timeline", "memory.txt", "train.py"], "ends in .png, .svg or .pdf"),
        (["--max-gib", "-1", "train.py"], "the memory limit is"),
        (["--max-gib", "99", "train.py"], "the memory limit is 99.00 GiB"),
        (["--world-size", "2", "--nodes", "2", "train.py"], "--world-size already sets"),
    ],
)
def test_bad_input_is_one_line(script, words, said):
    script("step()")
    result = run("--gpu", "T4", *words)
    assert result.exit_code == 2 and result.stdout == "" and said in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1


def test_an_optimizer_that_steps_others_takes_one_step(script):
    both = """
class Both(torch.optim.Optimizer):
    def __init__(self):
        super().__init__(model.parameters(), {})
        self.held = [torch.optim.SGD([each]) for each in model.parameters()]
    def step(self):
        for each in self.held: each.step()
optimizer = Both()
for i in range(5): step()
"""
    found = answer("--gpu", "A100-40GB", "--steps", 2, script(both))
    assert (found["steps"], found["ended"]) == (2, "was ended after 2 optimizer steps")


def test_what_is_written_of_the_host_goes_with_the_other_files(script, tmp_path):
    """torch and safetensors write by C++ and Rust, which would not ask where."""
    body = """
from safetensors.torch import load_file, save_file
os.makedirs("state")
torch.save({"epoch": 3}, "state/epoch.pt")
save_file({"mean": torch.arange(3.0)}, "state/mean.safetensors")
print(torch.load("state/epoch.pt"), load_file("state/mean.safetensors"))
step()
"""
    result = run("--gpu", "T4", "--out", tmp_path / "out", script(body))
    assert result.exit_code == 0, result.stderr
    assert "{'epoch': 3} {'mean': tensor([0., 1., 2.])}" in result.stdout
    assert not Path("state").exists()
    assert {each.name for each in (tmp_path / "out").rglob("*.*")} == {"epoch.pt", "mean.safetensors"}


def test_states_that_a_checkpoint_is_loaded_into_are_no_step(script):
    rest = """
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
assert get_optimizer_state_dict(model, optimizer)["state"]
step()
"""
    assert answer("--gpu", "A100-40GB", script(rest))["steps"] == 1


BY_HAND = """
for i in range(50):
    (model(torch.randn(64, 256, device="cuda")).square().mean()).backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None
"""


def test_a_script_without_an_optimizer_ends_after_as_many_backward_passes(script):
    found = answer("--gpu", "T4", "--steps", "3", script(BY_HAND, without="optimizer = "))
    assert "after 3 backward passes" in found["ended"] and found["outcome"] == "fits"


def test_backward_passes_are_no_steps_where_an_optimizer_is(script):
    name = script("for i in range(4): model(torch.randn(4, 256).cuda()).sum().backward()\nstep()")
    found = answer("--gpu", "T4", "--steps", "1", name)
    assert found["ended"] == "was ended after 1 optimizer step"


def test_a_check_of_the_type_of_a_value_that_no_gpu_computed_is_refused(script):
    """As gym's environments check actions; with --assume there is a number."""
    body = """
action = model(torch.randn(1, 256, device="cuda")).argmax().item()
assert type(action) is int, f"{action!r} ({type(action)}) invalid"
"""
    refused = run("--gpu", "T4", script(body))
    assert refused.exit_code == 2 and "a value that the simulated GPU does not have" in refused.stderr
    assert "--assume" in refused.stderr and "Traceback" not in refused.stderr
