"""What each step leaves behind and which line keeps it, and the phases of evaluation and of saving."""

import gc
import json

import pytest
from click.testing import CliRunner

from llmlab.cli import main as cli

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from llmlab.hardware.gpu import gpu  # noqa: E402
from llmlab.scripts.watch import Conditions, watched  # noqa: E402

if torch.cuda.is_available():
    pytest.skip("the simulated device must not be mistaken for a real one", allow_module_level=True)

D, B, STEPS = 256, 1024, 4
MiB = 2**20


class Loop:
    """A training loop whose `after` is called with the output and the loss of each step."""

    def __init__(self, after=lambda loop, output, loss: None):
        self.after, self.outputs = after, {"logits": []}
        self.model = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def run(self):
        for step in range(STEPS):
            output = self.model(torch.randn(B + 64 * step, D, device="cuda"))
            loss = output.square().mean()
            loss.backward(retain_graph=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.after(self, output, loss)


def report_of(after):
    with watched(Conditions(gpu("T4"))) as watch:
        Loop(after).run()
        return watch.report("loop")


def growth_note(report):
    return next((note for note in report.notes if note.code == "growth"), "")


def test_a_loop_that_keeps_numbers_does_not_grow():
    losses = []
    report = report_of(lambda loop, output, loss: losses.append(loss.item()))
    assert not growth_note(report) and sum(report.growth.values()) < MiB


def test_a_step_with_a_triton_kernel_of_unknown_time_says_that_its_own_is_unknown():
    triton = pytest.importorskip("triton")

    @triton.jit
    def scaled(x):
        pass

    report = report_of(lambda loop, output, loss: scaled[(1,)](output))
    assert report.step_seconds is None
    assert [note.code for note in report.notes if "Triton" in note] == ["triton-kernels", "time-unknown"]


@pytest.mark.parametrize("idle", [0, 1])
def test_outputs_that_are_kept_grow_by_their_bytes(idle):
    """Also beside an optimizer that never steps, because of which the end of an update is only seen at the next one."""
    idle = [torch.optim.SGD(nn.Linear(1, 1).parameters()) for _ in range(idle)]
    report = report_of(lambda loop, output, loss: loop.outputs["logits"].append(output.detach()))
    kept = 4 * D * (B + 64 * (STEPS - 2))  # of the last step but one
    assert sum(report.growth.values()) == pytest.approx(kept, rel=0.1)
    assert '.outputs["logits"].append(output.detach())' in growth_note(report)


def test_a_loss_keeps_the_graph_of_its_step():
    losses = []

    def keep(loop, output, loss):
        losses.append(loss)

    report = report_of(keep)
    # Inputs, both linear layers' outputs and GELU's: what autograd saved.
    assert sum(report.growth.values()) == pytest.approx(4 * B * (D + 4 * D + 4 * D + D), rel=0.2)
    assert any("test_watch.py" in place for place in report.growth)


def test_a_sum_of_losses_is_held_by_its_variable():
    with watched(Conditions(gpu("T4"))) as watch:
        loop, total = Loop(), 0
        for _ in range(STEPS):
            loss = loop.model(torch.randn(B, D, device="cuda")).square().mean()
            loss.backward(retain_graph=True)
            total += loss
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        report = watch.report("loop")
    assert "`total += loss`" in growth_note(report)


@pytest.mark.parametrize("history", [2, 5])
def test_lbfgs_grows_until_its_history_is_full(history):
    """Each iteration adds a gradient and a direction, as long as there are fewer than history_size of them."""
    with watched(Conditions(gpu("T4"))) as watch:
        model = nn.Linear(D, 4 * D).cuda()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1, history_size=history)
        for _ in range(STEPS):
            optimizer.step(lambda: closure(model, optimizer))
        report = watch.report("loop")
    weights = (D + 1) * 4 * D * 4
    if history < STEPS:
        assert not growth_note(report)
    else:
        assert f"{2 * history * weights / MiB:.2f} MiB in all" in growth_note(report)
        assert sum(report.growth.values()) == pytest.approx(2 * weights, rel=0.01)
        assert "more steps" not in growth_note(report)  # it never fills the GPU


def closure(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.randn(B, D, device="cuda")).square().mean()
    loss.backward()
    return loss


def test_passes_without_gradients_and_saving_are_phases_of_their_own():
    sizes = {}

    def evaluate(loop, output, loss):
        with torch.no_grad():
            loop.model(torch.randn(16 * B, D, device="cuda"))
        state = {name: value.clone() for name, value in loop.model.state_dict().items()}
        sizes["state"] = sum(value.nbytes for value in state.values())

    with watched(Conditions(gpu("T4"))) as watch:
        Loop(evaluate).run()
        phases = watch.report("loop").phases
    plain = report_of(lambda loop, output, loss: None).phases
    assert "no-grad" not in plain and "saving" not in plain
    assert phases["no-grad"] > phases["forward"]
    assert phases["forward"] == plain["forward"]
    assert phases["saving"] >= plain["load"] + sizes["state"]


@pytest.mark.parametrize(("dtype", "said"), [(torch.bfloat16, "no bf16 units"), (torch.float16, None)])
def test_a_time_that_the_gpu_lacks_units_for_is_unknown_and_says_why(dtype, said):
    with watched(Conditions(gpu("T4"))) as watch:
        model = nn.Linear(D, D, dtype=dtype).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.randn(B, D, device="cuda", dtype=dtype)).sum().backward()
            optimizer.step()
        report = watch.report("loop")
    notes = [note for note in report.notes if note.code == "time-unknown"]
    assert (report.step_seconds is None) == bool(notes) == bool(said) and all(said in note for note in notes)


# ---- updates


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
    "an optimizer that steps another twice": ("""
class Sharpness(torch.optim.SGD):  # as SAM does
    def step(self):
        inner.step()
        loss().backward()
        inner.step()
optimizer, inner = (kind(model.parameters(), lr=0.1) for kind in (Sharpness, torch.optim.SGD))
""", """
for step in range(6):
    loss().backward()
    print("update")
    optimizer.step()
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


ACTOR_CRITIC = """
import deepspeed, torch
def engine(width, train=True):
    config = {{"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": {micro_batches},
              "bf16": {{"enabled": True}}, "zero_optimization": {{"stage": 2 if train else 0}}}}
    if train:
        config["optimizer"] = {{"type": "AdamW", "params": {{"lr": 1e-4, "torch_adam": True}}}}
    return deepspeed.initialize(model=torch.nn.Linear(width, width), config=config)[0]
actor, critic, reference = engine(1024), engine(512), engine(1024, train=False)
for step in range(10):
    for part, width in ((actor, 1024), (critic, 512)):
        x = torch.randn(8, width, device=part.device, dtype=torch.bfloat16)
        part.backward(part(x).float().pow(2).mean())
        part.step()
    print("actor and critic")
"""


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_engines_of_an_actor_and_a_critic_step_once_in_an_update(answer, micro_batches):
    """deepspeedai/DeepSpeedExamples, applications/DeepSpeed-Chat, ppo_trainer.py; the engine of the reference model
    steps never."""
    pytest.importorskip("deepspeed")
    script = ACTOR_CRITIC.format(micro_batches=micro_batches)
    report, printed = answer(script, "--steps", 2, launcher=["deepspeed", "--num_gpus", "2"])
    done = 2 * micro_batches - 1  # the last update ends inside its turn of the loop
    assert (report["steps"], printed.count("actor and critic")) == (2, done)


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
