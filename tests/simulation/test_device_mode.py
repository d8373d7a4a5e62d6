"""The device cuda is the simulated GPU."""

import pytest
import torch
from torch import nn

from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_checkpointing_holds_less_and_recomputes_code_that_says_cuda():
    from torch.utils.checkpoint import checkpoint

    def block(x):
        mask = torch.ones(x.shape[-1]).cuda()
        return nn.functional.gelu(nn.functional.gelu(x * mask)).tanh()

    def peak(recompute):
        with simulator("A100-40GB") as sim:
            x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
            h = x
            for _ in range(6):
                h = checkpoint(block, h, use_reentrant=False) if recompute else block(h)
            h.sum().backward()
            assert x.grad.shape == x.shape
        return sim.peak_allocated

    assert peak(True) < 0.6 * peak(False)


def test_a_model_and_optimizer_made_before_the_block_keep_ties_and_get_their_weights_back():
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100, bias=False))
    model[1].weight = model[0].weight
    weight = model[0].weight
    with simulator("T4") as sim:
        model.cuda()
        assert model[1].weight is model[0].weight
        assert sim.allocated == 100 * 16 * 4 + 256  # 6400 B in blocks of 512 B
        model(torch.zeros(1, dtype=torch.long, device="cuda")).sum().backward()
    assert model[0].weight is weight and model[1].weight is weight
    assert weight.grad is None and torch.isfinite(model(torch.zeros(1, dtype=torch.long))).all()


@pytest.mark.parametrize("make", [
    lambda: torch.zeros(3, device="cuda"),
    lambda: torch.tensor([1.0, 2.0, 3.0], device="cuda:0"),
    lambda: torch.tensor(3.0, device=torch.device("cuda")),
    lambda: torch.tensor([]).cuda(),
    lambda: torch.arange(3).to("cuda", torch.float16),
    lambda: torch.ones(3).to(0),
    lambda: torch.zeros(3, device="cuda").new_tensor([1, 2]),
    lambda: torch.rand(3, device="cuda").pow(2),
    lambda: torch.nn.Linear(3, 3, device="cuda").weight,
])  # fmt: skip
def test_every_way_to_the_card_ends_there(make):
    with simulator("T4"):
        assert make().device == torch.device("cuda", 0)
        assert make().cpu().device == torch.device("cpu")


def test_default_device_holds_inside_and_not_after():
    with simulator("T4"):
        with torch.device("cuda"):
            assert torch.ones(2).is_cuda
        torch.set_default_device("cuda")
        assert torch.ones(2).is_cuda and torch.tensor([1.0]).is_cuda
    assert torch.ones(2).device == torch.device("cpu") and type(torch.ones(2)) is torch.Tensor


MIXES = {
    "sum": lambda card, host: card + host,
    "sums": lambda card, host: torch._foreach_add([card], [host]),
    "in place": lambda card, host: torch._foreach_lerp_([card, host], [host, host], 0.5),
    "the other way": lambda card, host: torch._foreach_mul_([host, host], [host, card]),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_tensors_on_card_and_host_do_not_mix(mix):
    with simulator("T4"), pytest.raises(RuntimeError, match=r"same device.* (cuda:0 and cpu|cpu and cuda:0)!"):
        mix(torch.ones(3, device="cuda"), torch.ones(3))


def test_lists_of_the_card_s_numbers_make_tensors():
    with simulator("T4"):
        lengths, losses = torch.tensor([3, 4], device="cuda"), torch.rand(2, device="cuda")
        assert torch.tensor([lengths[0], lengths[1]], device="cuda").tolist() == [3, 4]
        assert torch.tensor([[lengths[1]], [2]]).tolist() == [[4], [2]]
        assert str(torch.tensor([losses[0], 1.0], device="cuda").sum().item()) == "?"


def test_only_what_is_on_the_host_is_pinned():
    with simulator("T4"):
        host = torch.ones(1000)
        pinned = host.pin_memory()
        assert pinned.is_pinned() and not host.is_pinned() and torch.equal(pinned, host)
        assert torch.empty(3, pin_memory=True).is_pinned()
        with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
            host.cuda().pin_memory()
