"""`llmlab run --steps N`: one update of the weights counts once, whatever makes it: one optimizer's step, several, a
closure, hooks in backward, or DeepSpeed's groups of parameters."""

import gc
import json

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from llmlab.cli import main as cli  # noqa: E402

HEAD = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).cuda()
weights = [each for each in model.parameters() if each.dim() == 2]
biases = [each for each in model.parameters() if each.dim() == 1]
def loss():
    return model(torch.randn(8, 256, device="cuda")).square().mean()
"""
IN_BACKWARD = """
optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}
def hook(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(hook)
"""
IN_BACKWARD_AND_HELD = IN_BACKWARD + """
class Held(torch.optim.Optimizer):  # as torchtitan's OptimizersInBackwardContainer
    def __init__(self): super().__init__(model.parameters(), {})
    def step(self): pass
optimizer = Held()
"""
TWO = "optimizers = torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(biases)\n"
ADVERSARIES = """
other = nn.Linear(256, 256).cuda()
optimizers = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
"""
# By what makes an update: its definitions, and a loop in which `print` comes before an update is whole. After it, where
# only the next update shows that it was whole.
LOOPS = {
    "two optimizers": (TWO, """
for step in range(6):
    loss().backward()
    print("update")
    for each in optimizers: each.step()
    for each in optimizers: each.zero_grad()
"""),
    "two optimizers, scaled and accumulated": (TWO, """
scaler = torch.amp.GradScaler("cuda")
for step in range(6):
    for _ in range(2): scaler.scale(loss()).backward()
    print("update")
    for each in optimizers: scaler.step(each)
    scaler.update()
    for each in optimizers: each.zero_grad()
"""),
    "a closure": ("optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)\n", """
def closure():
    optimizer.zero_grad()
    value = loss()
    value.backward()
    return value
for step in range(6):
    print("update")
    optimizer.step(closure)
"""),
    "two networks, one after the other": (ADVERSARIES, """
for step in range(6):
    optimizers[0].zero_grad()
    loss().backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    model(other(torch.randn(8, 256, device="cuda"))).sum().backward()  # the first network has gradients too
    print("update")
    optimizers[1].step()
"""),
    "two networks, by a function": (ADVERSARIES, """
def train(network, optimizer):
    optimizer.zero_grad()
    network(torch.randn(8, 256, device="cuda")).sum().backward()
    optimizer.step()
for step in range(6):
    train(model, optimizers[0])
    print("update")
    train(other, optimizers[1])
"""),
    "one network more often than the other": (ADVERSARIES, """
for step in range(3):
    for critic in range(2):
        optimizers[0].zero_grad()
        loss().backward()
        optimizers[0].step()
        print("update")
    optimizers[1].zero_grad()
    model(other(torch.randn(8, 256, device="cuda"))).sum().backward()
    optimizers[1].step()
"""),
    "an optimizer that never steps": (ADVERSARIES, """
for step in range(6):
    optimizers[0].zero_grad()
    loss().backward()
    optimizers[0].step()
    print("update")
"""),
    "one of two optimizers at a time": (TWO, """
for step in range(6):
    loss().backward()
    optimizers[step % 2].step()
    optimizers[step % 2].zero_grad()
    print("update")
"""),
    "a new optimizer for each": ("", """
for step in range(6):
    optimizer = torch.optim.AdamW(model.parameters())
    loss().backward()
    print("update")
    optimizer.step()
    optimizer.zero_grad()
"""),
}  # fmt: skip


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Run a script with `options`; return its report, and the lines of what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(body, *options, launcher=()):
        (tmp_path / "train.py").write_text(body)
        words = ["run", "--json", "--gpu", "A100-80GB", *map(str, options), *launcher, "train.py"]
        gc.freeze()  # else optimizers that other tests leave behind count as the script's: hooks keep theirs alive
        result = CliRunner().invoke(cli.cli, words)
        assert result.exit_code == 0, (result.stderr, result.exception)
        return json.loads(result.stdout), result.stderr.splitlines()

    return run


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_script_ends_after_so_many_whole_updates(answer, kind, steps):
    report, printed = answer(HEAD + "".join(LOOPS[kind]), "--steps", steps)
    assert (report["steps"], printed.count("update")) == (steps, steps)
    assert report["ended"].startswith("was ended")


@pytest.mark.parametrize("kind", LOOPS)
def test_a_script_that_runs_to_its_end_has_all_of_its_updates(answer, kind):
    report, printed = answer(HEAD + "".join(LOOPS[kind]))
    assert (report["steps"], report["ended"]) == (printed.count("update"), "ran to its end")


@pytest.mark.parametrize(("before", "after"), [(IN_BACKWARD, ""), (IN_BACKWARD_AND_HELD, "    optimizer.step()\n")])
def test_a_step_for_each_parameter_in_backward_is_one_update(answer, before, after):
    """torchtune's full fine-tuning of Llama-2-7B in less than 16 GB, https://github.com/meta-pytorch/torchtune/pull/389"""
    loop = "for step in range(6):\n    loss().backward()\n    print('update')\n"
    report, printed = answer(HEAD + before + loop + after, "--steps", 2)
    assert (report["steps"], printed.count("update")) == (2, 2)
    whole, _ = answer(HEAD + before + loop + after)
    assert (whole["steps"], whole["peak_allocated"]) == (6, report["peak_allocated"])
    assert whole["step_seconds"] == pytest.approx(report["step_seconds"], rel=0.01)


def test_two_optimizers_take_the_time_of_both(answer):
    """An update has each parameter once, so that one optimizer for all of them takes about as long."""
    one = "optimizers = [torch.optim.AdamW([{'params': weights}, {'params': biases}])]\n"
    two = "optimizers = [torch.optim.AdamW(weights), torch.optim.AdamW(biases)]\n"
    seconds = [answer(HEAD + each + LOOPS["two optimizers"][1])[0]["step_seconds"] for each in (one, two)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)


def test_a_block_that_checkpointing_runs_backward_is_no_pass_of_its_own(answer):
    body = """
from torch.utils.checkpoint import checkpoint
for i in range(4):
    x = torch.randn(8, 256, device="cuda", requires_grad=True)
    for block in model: x = checkpoint(block, x, use_reentrant=True)
    x.sum().backward()
    print("pass")
"""
    report, printed = answer(HEAD + body, "--steps", 2)
    assert report["ended"].startswith("was ended after 2 backward passes") and printed.count("pass") == 1


ZERO = """
import deepspeed, torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])
named = list(model.named_parameters())
groups = [{{"params": [p for n, p in named if n.endswith(e)]}} for e in {groups}]
config = {{"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "bf16": {{"enabled": True}},
           "zero_optimization": {{"stage": {stage}}}, "zero_allow_untested_optimizer": True}}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-4), config=config)
for step in range(10):
    x = torch.randn(8, 1024, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).float().pow(2).mean())
    print("micro-batch")
    engine.step()
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_steps_each_group_of_parameters_in_one_update(answer, stage):
    """https://github.com/cloneofsimo/min-max-gpt/pull/10; the Trainer's two groups have and have not weight decay."""
    pytest.importorskip("deepspeed")

    def run(groups, steps):
        launcher = ["deepspeed", "--num_gpus", "2"]
        return answer(ZERO.format(stage=stage, groups=groups), "--steps", steps, launcher=launcher)

    report, printed = run(("weight", "bias"), 2)
    assert (report["steps"], printed.count("micro-batch")) == (2, 4)
    assert run(("weight", "bias"), 4)[0]["peak_allocated"] == report["peak_allocated"]
    assert run([("weight", "bias")], 2)[0]["step_seconds"] == pytest.approx(report["step_seconds"], rel=0.3)
