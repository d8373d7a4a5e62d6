"""DTensors on a simulated GPU: an operator on one costs what it costs on this rank's part, and numbers can be read."""

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
        assert torch.nn.utils.get_total_norm([x]).item() == pytest.approx(4)  # small numbers of the host are followed
        norm = torch.nn.utils.get_total_norm([distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)])])
        assert (str(norm.item()), f"{norm:.2f}") == ("?", "?")
        assert not torch.isnan(norm) and torch.isfinite(norm)
        with pytest.warns(UserWarning, match="a comparison"):
            assert not norm > 10


def test_a_ring_of_queries_keys_and_values():
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ranks, tokens = 4, 4096
    with lab.simulator(CARD, world_size=ranks) as sim:
        mesh = init_device_mesh("cuda", (ranks,))
        x = torch.empty(1, HEADS, tokens, HEAD, dtype=torch.bfloat16, device="cuda")
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert x.shape[2] == tokens // ranks
            q, k, v = (x.clone().requires_grad_() for _ in range(3))
            sim.reset_peak()
            before = sim.allocated
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            part = out.numel() * 2
            # Kept: the output, and its logsumexp in fp32. On the way: keys and values of all ranks, gathered at once.
            assert part + HEADS * out.shape[2] * 4 <= sim.allocated - before < 1.2 * part
            assert sim.peak_allocated - before > 2 * ranks * part
            out.sum().backward()
            assert q.grad.shape == k.grad.shape == out.shape
        assert x.shape[2] == tokens
