"""A checkpointed block gives the gradients of a plain one, bit for bit, and saves as many bytes as the formula says."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.course.architectures.gpt import GPT, in_order
from llmlab.course.architectures.llama import Llama
from llmlab.course.techniques.checkpointing import (
    KEPT_OPERATORS,
    Conditions,
    best_spacing,
    checkpoint,
    every,
    peak_bytes,
    recompute,
    selective,
)
from llmlab.course.techniques.training_loop import next_token_loss

DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64, "vocab_size": 300}
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "vocab_size": 300,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {"gpt2": lambda: GPT.from_spec({**GPT2, **DROPOUT}), "llama": lambda: Llama.from_spec(LLAMA)}


def torch_selective(function, *inputs):
    kept = [getattr(torch.ops.aten, name).default for name in KEPT_OPERATORS if hasattr(torch.ops.aten, name)]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    return torch_checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)


torch_plain = functools.partial(torch_checkpoint, use_reentrant=False)
torch_reentrant = functools.partial(torch_checkpoint, use_reentrant=True)
WAYS = {
    "recompute": every(1, recompute),
    "recompute in threes": every(3, recompute),
    "hooks": every(1),
    "hooks in threes": every(3),
    "selective": every(1, selective),
    "torch": every(1, torch_plain),
    "torch re-entrant": every(1, torch_reentrant),
    "torch selective": every(1, torch_selective),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(300, (2, 64), generator=torch.Generator().manual_seed(0))


def gradients(model, ids, run, autocast=False):
    """Return the loss, all gradients, and the generator's state after one forward and backward."""
    model.run_blocks = run
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = next_token_loss(model(ids), ids)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_gradients_of_none_bit_for_bit(model, ids, way, autocast):
    loss, plain, state = gradients(model, ids, in_order, autocast)
    again, others, state_again = gradients(model, ids, WAYS[way], autocast)
    assert again == loss
    assert all(torch.equal(a, b) for a, b in zip(plain, others, strict=True))
    assert torch.equal(state, state_again), "recomputation leaves the generator where it was"
    assert any(p.abs().max() > 0 for p in others)


def test_without_the_old_random_state_the_gradients_are_of_another_function(ids):
    """If forward and recomputation drop different units, the gradient is not even close."""
    torch.manual_seed(0)
    model = MODELS["gpt2"]()
    _, plain, _ = gradients(model, ids, in_order)
    _, others, _ = gradients(model, ids, every(1, functools.partial(torch_plain, preserve_rng_state=False)))
    worst = max(((a - b).norm() / a.norm()).item() for a, b in zip(plain, others, strict=True) if a.norm() > 0)
    assert worst > 0.1


def test_parameters_get_gradients_where_the_input_needs_none():
    """torch's re-entrant checkpoint, which does not know the parameters, gives none here."""
    module, x = nn.Linear(8, 8), torch.randn(2, 8)
    for way in (recompute, checkpoint):
        module.zero_grad()
        way(module, x).sum().backward()
        assert module.weight.grad is not None
    module.zero_grad()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        y = torch_reentrant(module, x)
    assert not y.requires_grad


def test_frozen_parameters_stay_without_gradient():
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    module[0].requires_grad_(False)
    x = torch.randn(2, 8, requires_grad=True)
    recompute(module, x).sum().backward()
    assert module[0].weight.grad is None and module[2].weight.grad is not None and x.grad is not None


def test_what_recompute_cannot_differentiate_is_refused():
    block = nn.Bilinear(4, 4, 4)
    x, other = torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)
    with pytest.raises(SpecError, match="use checkpoint"):
        recompute(block, x, other)
    checkpoint(block, x, other).sum().backward()
    assert other.grad is not None


# ---- memory


def flops(model, ids, run):
    model.run_blocks = run
    with FlopCounterMode(display=False) as counter:
        next_token_loss(model(ids), ids).backward()
    return counter.get_total_flops()


def test_checkpointing_repeats_the_blocks_forward_and_selective_repeats_no_product(ids):
    torch.manual_seed(0)
    # Without dropout the CPU's attention is one operator, as on a GPU.
    model = GPT.from_spec({**GPT2, **dict.fromkeys(DROPOUT, 0.0)})
    with FlopCounterMode(display=False) as forward:
        hidden = model.hidden(ids)
    assert hidden.shape == (2, 64, 64)
    none = flops(model, ids, in_order)
    for k in (1, 2, 4):
        assert flops(model, ids, every(k)) == none + forward.get_total_flops()
    assert flops(model, ids, every(1, selective)) == none


def chain(layers):
    """Layers that save as much as their input: tanh saves its output, which is the next layer's input."""
    return nn.ModuleList(nn.Tanh() for _ in range(layers))


def measured_peak(run, layers, x):
    with lab.meter("cpu") as meter:
        run(layers, x).sum().backward()
        x.grad = None
    return meter.peak_allocated


def test_the_peak_over_the_spacing_is_the_formula_and_its_lowest_point_the_root():
    layers, x = chain(36), torch.randn(1 << 16, requires_grad=True)
    size = x.nbytes
    peaks = {k: measured_peak(every(k), layers, x) / size for k in (1, 2, 3, 4, 6, 9, 12, 18, 36)}
    for k, peak in peaks.items():
        assert peak == pytest.approx(peak_bytes(36, k, 1, 1), abs=3), "gradients of one layer, and the end's output"
    assert min(peaks, key=peaks.get) == best_spacing(36, size, size) == 6
    assert measured_peak(in_order, layers, x) / size == pytest.approx(36, abs=3)


def test_a_transformers_best_spacing_is_every_block(ids):
    """A block saves many times its input, so √(L · a / A) is below 1."""
    torch.manual_seed(0)
    model = MODELS["gpt2"]()
    assert best_spacing(32, 2, 34) < 2, "a block of 34sbh bytes with an input of 2sbh"
    peaks = {}
    for k in (1, 2, 4):
        model.run_blocks = every(k)
        with lab.meter("cpu") as meter:
            next_token_loss(model(ids), ids).backward()
            model.zero_grad()
        peaks[k] = meter.peak_allocated
    assert peaks[1] < peaks[2] < peaks[4]


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 50))
def test_no_spacing_beats_the_best_by_more_than_rounding(layers, a, A):
    best = best_spacing(layers, a, A)
    lowest = 2 * math.sqrt(layers * a * A)  # of L / k · a + k · A, over real k
    assert layers / best * a + best * A == pytest.approx(lowest)
    assert min(peak_bytes(layers, k, a, A) for k in range(1, layers + 1)) >= lowest - 1e-9 - (best > layers) * lowest


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_a_spacing_is_a_whole_number(k):
    with pytest.raises(SpecError, match="whole number"):
        every(k)


def test_on_a_simulated_card_it_takes_the_bytes_of_torchs(ids):
    peaks = []
    for way in (checkpoint, torch_plain, selective, torch_selective):
        with lab.simulator("T4") as card:
            model = MODELS["llama"]().cuda()
            model.run_blocks = every(1, way)
            tokens = ids.cuda()
            next_token_loss(model(tokens), tokens).backward()
        peaks.append(card.peak_allocated)
    assert peaks[0] == peaks[1]
    assert peaks[2] == pytest.approx(peaks[3], rel=0.005) and peaks[2] > 1.02 * peaks[0]


def test_conditions_are_those_of_the_time_they_were_taken():
    with torch.autocast("cpu", torch.bfloat16):
        conditions = Conditions(torch.device("cpu"))
        drawn = torch.rand(3)
    after = torch.get_rng_state()
    with conditions.again():
        assert torch.equal(torch.rand(3), drawn)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.equal(torch.get_rng_state(), after) and not torch.is_autocast_enabled("cpu")
