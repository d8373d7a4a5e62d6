"""DTensors on a simulated card: an operator on one costs what it costs on this rank's part, and numbers can be read."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module

import llmlab as lab

CARD, RANKS = "A100-40GB", 2
HEADS, TOKENS, HEAD = 8, 1024, 64
# By operator: what it is called with, and the dimension that ranks share. On a CPU each is made of others.
OPERATORS = {
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), 1),
    "norm": (lambda x: F.rms_norm(x, (HEAD,)), 1),
    "dropout": (lambda x: F.dropout(x, 0.5), 1),
    "softmax": (lambda x: x.softmax(-1, dtype=torch.float32), 1),
}


def taken(call, x):
    """Bytes that `call` keeps for backward, and its peak through backward."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(x.requires_grad_())
    kept = torch.cuda.memory_allocated() - before
    out.backward(torch.ones_like(out))
    return kept, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_costs_what_it_costs_on_the_part(name):
    call, dim = OPERATORS[name]
    shape = [2, HEADS, TOKENS, HEAD]
    with lab.simulator(CARD, world_size=RANKS):
        mesh = init_device_mesh("cuda", (RANKS,))
        whole = distribute_tensor(torch.empty(shape, dtype=torch.float16, device="cuda"), mesh, [Shard(dim)])
        measured = taken(call, whole)
    shape[dim] //= RANKS
    with lab.simulator(CARD):
        assert measured == taken(call, torch.empty(shape, dtype=torch.float16, device="cuda"))
    assert measured[0] > 0


def test_a_linear_cut_by_rows_and_a_norm_of_its_tokens():
    tokens, width = 1024, 512
    with lab.simulator(CARD, world_size=RANKS) as sim:
        mesh = init_device_mesh("cuda", (RANKS,))
        model = nn.Sequential(nn.Linear(width, width, bias=False), nn.RMSNorm(width)).to("cuda", torch.bfloat16)
        plan = {"0": RowwiseParallel(output_layouts=Shard(0), use_local_output=False), "1": SequenceParallel()}
        model = parallelize_module(model, mesh, plan)
        x = torch.empty(tokens, width // RANKS, dtype=torch.bfloat16, device="cuda")
        model(x)  # cuBLAS has its workspace now
        before = sim.allocated
        out = model(x)
        # The product's part of a sum, freed; its sum over the ranks, of half of the tokens; the norm of those, and
        # 4 bytes a token for backward.
        half = tokens // RANKS * width * 2
        assert isinstance(out, DTensor) and sim.allocated - before == half + half + tokens // RANKS * 4


def test_numbers_are_read_of_the_whole():
    with lab.simulator(CARD, world_size=RANKS):
        mesh = init_device_mesh("cuda", (RANKS,))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        assert (x.device, x.is_cuda, x.get_device()) == (torch.device("cuda:0"), True, 0)
        assert x.full_tensor().device.type == "cuda" and x.redistribute(mesh, [Replicate()]).to_local().shape == (4, 4)
        norm = torch.nn.utils.get_total_norm([x])
        assert (str(norm.item()), f"{norm:.2f}") == ("?", "?")
        assert not torch.isnan(norm) and torch.isfinite(norm)
        with pytest.warns(UserWarning, match="a comparison"):
            assert not norm > 10
