"""What each step leaves behind and which line keeps it, and the phases of evaluation and of saving."""

import pytest

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
