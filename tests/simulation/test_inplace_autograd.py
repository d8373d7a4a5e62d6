"""What autograd sums and fills in place on plain tensors: the simulated CPU takes what the real one takes."""

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

import llmlab as lab
from llmlab.simulation.allocator.memory import HostMemory
from llmlab.simulation.engine.engine import HOST, Engine
from llmlab.simulation.engine.operators import changes_values_alone
from llmlab.simulation.simulator import simulator

N = 256
SLACK = 8192  # bytes: small results of both sides, as counts and scalars


def hidden() -> Tensor:
    return torch.ones(N, N, requires_grad=True) * 1.0


def three_uses() -> None:
    h = hidden()
    torch.autograd.backward([h * 2, h * 3, h * 4], [torch.ones(N, N)] * 3)


def expanded_first() -> None:  # sum's gradient has stride 0
    h = hidden()
    torch.autograd.backward([h * 2, h.sum()], [torch.ones(N, N), torch.ones(())])


def of_one_node() -> None:
    h = hidden()
    (h * h).sum().backward()


def in_a_formula() -> None:  # FunctionsManual.cpp, atan2_backward: self * self + other * other
    torch.atan2(hidden(), torch.ones(N, N)).backward(torch.ones(N, N))


def of_shared_storage() -> None:  # the view's gradient is the caller's
    h = hidden()
    torch.autograd.backward([h * 2, h.view_as(h)], [torch.ones(N, N)] * 2)


def kept_by_a_function() -> None:
    kept = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            kept.append(grad * 2)
            return kept[-1]

    h = hidden()
    torch.autograd.backward([h * 2, Keep.apply(h)], [torch.ones(N, N)] * 2)


def gather() -> None:
    hidden().gather(1, torch.zeros(N, N, dtype=torch.long)).sum().backward()


def index() -> None:
    hidden()[torch.zeros(N, dtype=torch.long)].sum().backward()


def largest() -> None:
    hidden().max(1).values.sum().backward()


def top() -> None:
    hidden().topk(8, 1).values.sum().backward()


STEPS = [three_uses, expanded_first, of_one_node, in_a_formula, of_shared_storage, kept_by_a_function, gather, index,
         largest, top]  # fmt: skip


def peak_and_total(changes: Iterable[int]) -> tuple[int, int]:
    """Return the most bytes held, and all that were asked for."""
    changes = list(changes)
    return max(accumulate(changes)), sum(size for size in changes if size > 0)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_simulated_cpu_takes_what_the_real_one_takes(step: Callable[[], None]) -> None:
    step()
    with lab.meter("cpu") as meter:
        step()
    measured = peak_and_total(after - before for before, after in pairwise((0, *meter.timeline)))
    engine = Engine(HOST, HostMemory(), workspaces={})
    with engine:
        step()
    assert peak_and_total(event.size for event in engine.events) == pytest.approx(measured, abs=SLACK)


def test_a_simulated_card_adds_two_gradients_in_the_place_of_the_first() -> None:
    """input_buffer.cpp, accumulate: x, h, and its two gradients; a third would make five."""
    with simulator("A100-40GB") as sim:
        h = torch.ones(N, N, device="cuda", requires_grad=True) * 1.0
        one, other, grad = h * 2, h * 3, torch.ones(N, N, device="cuda")
        before = sim.allocated
        sim.reset_peak()
        torch.autograd.backward([one, other], [grad, grad])
        assert sim.peak_allocated - before == 2 * 4 * N * N


def test_gradients_of_a_gradient_are_added_out_of_place() -> None:
    """input_buffer.cpp, accumulate: where gradients are recorded, nothing is overwritten."""
    with simulator("A100-40GB") as sim:
        x = torch.ones(N, N, device="cuda", requires_grad=True)
        h = x * 1.0
        loss = torch.stack([(h * 2).sum(), (h * 3).sum()]).sum()
        sim.reset_peak()
        before = sim.allocated
        torch.autograd.grad(loss, x, create_graph=True)
        assert sim.peak_allocated - before >= 3 * 4 * N * N


# ---- lists of tensors that an optimizer changes


def test_a_change_of_a_list_reaches_values_that_are_known_and_real_tensors():
    real = torch.ones(3)
    assert not changes_values_alone(torch.ops.aten._foreach_add_.Scalar, ([real], 1))
    with simulator("T4"):
        counts = torch.arange(3, device="cuda")
        torch._foreach_add_([counts], 1)
        torch._foreach_add_([real], 1)
        assert counts.tolist() == [1, 2, 3]
    assert real.tolist() == [2, 2, 2]


def test_lists_that_torch_refuses_are_refused():
    with simulator("T4"):
        x = torch.empty(4096, device="cuda")  # of unknown values
        for mode in (torch.enable_grad, torch.inference_mode):  # the second goes past autograd, which looks too
            with mode(), pytest.raises(RuntimeError, match=r"2 and 1|same"):
                torch._foreach_add_([x, x], [x])


@pytest.mark.parametrize(("changed", "by"), [
    (torch.float32, {"size": 2000}), (torch.int64, {}), (torch.int64, {"dtype": torch.float16}),
])  # fmt: skip
def test_tensors_that_torch_does_not_add_are_not_added_in_lists(changed, by):
    made = lambda size=4096, **more: torch.empty(size, device="cuda", **more)  # noqa: E731
    with simulator("T4"), pytest.raises(RuntimeError, match=r"broadcast|Promotion"):
        torch._foreach_add_([made(dtype=changed)], [made(**by)])


def test_a_list_is_changed_without_memory():
    with simulator("T4") as sim:
        x = [torch.ones(300, device="cuda") for _ in range(3)]
        held = sim.allocated
        sim.reset_peak()
        torch._foreach_mul_(x, 2.0)
        torch._foreach_addcdiv_(x, x, x)
        assert sim.peak_allocated == held
