"""torch.compile on the simulated GPU: what Inductor keeps, frees and makes again is what the GPU holds."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llmlab as lab
from llmlab import Training
from llmlab.simulation.simulator import simulator

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the simulated device must not be mistaken for a real one", allow_module_level=True)

MiB = 2**20
pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFloat32")


def taken(function, *inputs):
    """Bytes at the peak of a call, beyond what was there, and those that its result keeps alive."""
    with simulator("A100-40GB") as sim:
        inputs = [each.cuda().requires_grad_(each.requires_grad) for each in inputs]
        before = sim.allocated
        sim.reset_peak()
        out = function(*inputs)
        kept = sim.allocated - before
        assert not [note for note in sim.notes if note.code == "ran-eager"]
        del out
        return sim.peak_allocated - before, kept


def chain(x):
    return x.exp().cos().sin() * 2


def test_a_pointwise_chain_makes_its_result_alone():
    x = torch.zeros(4, MiB)  # 16 MiB
    assert taken(chain, x)[0] == 2 * 16 * MiB
    assert taken(torch.compile(chain), x) == (16 * MiB, 16 * MiB)


def test_backward_of_a_pointwise_chain_needs_its_input_alone():
    x = torch.zeros(4, MiB, requires_grad=True)
    assert taken(chain, x)[1] == 3 * 16 * MiB  # the result, and those of exp and cos
    assert taken(torch.compile(chain), x)[1] == 16 * MiB  # all is computed again from x


class Model(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64)
        self.checkpointed = checkpointed

    def layer(self, x):
        return x + self.down(self.drop(F.gelu(self.up(x))))

    def forward(self, x):
        checkpoint = torch.utils.checkpoint.checkpoint
        return (checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)).square().mean()


def trained(prepare, **model):
    """The simulator after a step under autocast."""
    with simulator("A100-40GB") as sim, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Model(**model).cuda()
        step = prepare(model)
        with torch.autocast("cuda", torch.bfloat16):
            loss = step(torch.randn(64, 128, 64).cuda())
        loss.backward()
    return sim


def with_a_break(model):
    def step(x):
        loss = model(x)
        print(f"{loss.item():.3f}")  # Dynamo breaks the graph here
        return loss * 2

    return torch.compile(step)


def on_a_named_device(model):
    def step(x):
        assert x.is_cuda and x.device.type == "cuda" and torch.cuda.is_available()
        return model(x + torch.zeros(x.shape, device="cuda").to("cuda:0"))

    return torch.compile(step, fullgraph=True)


@pytest.mark.parametrize("prepare", [with_a_break, on_a_named_device])
def test_a_compiled_step_takes_less(prepare):
    sim = trained(prepare)
    assert not [note for note in sim.notes if note.code == "ran-eager"]
    assert sim.counts_all_kernels  # by the bytes that Inductor says its kernels move
    assert sim.peak_allocated < trained(lambda model: model).peak_allocated


def test_checkpointing_inside_draws_the_same_again():
    sim = trained(torch.compile, checkpointed=True)
    assert not [note for note in sim.notes if note.code == "ran-eager"]
    assert sim.peak_allocated < trained(lambda model: model, checkpointed=True).peak_allocated


def test_a_compiled_product_of_float8_takes_its_result_and_cublaslts_workspace():
    """Inductor calls _scaled_mm.out, of which torch has no fake kernel: it ran a real product on the host."""

    def product(a, b, scale):
        return torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16)

    a, b = (torch.zeros(rows, 8192, dtype=torch.float8_e4m3fn) for rows in (16384, 4096))
    scale = torch.ones(())
    for function in (product, torch.compile(product)):
        with simulator("H100") as sim:
            held = [each.cuda() for each in (a, b, scale)]
            before = sim.allocated
            out = function(*held)
            assert out.shape == (16384, 4096)
            assert sim.allocated - before == 2 * 16384 * 4096 + MiB
            assert not [note for note in sim.notes if note.code == "ran-eager"]


def test_another_shape_is_compiled_anew():
    function = torch.compile(chain)
    assert taken(lambda x, y: [function(x), function(y)], torch.zeros(2, MiB), torch.zeros(3, MiB))[1] == 5 * 4 * MiB


def test_what_inductor_cannot_compile_runs_eager_and_is_named(monkeypatch):
    from torch._inductor.graph import GraphLowering

    def fails(self, *args):
        raise NotImplementedError("no lowering")

    monkeypatch.setattr(GraphLowering, "run", fails)
    sim, eager = trained(torch.compile), trained(lambda model: model)
    note = next(note for note in sim.notes if note.code == "ran-eager")
    assert re.search(r"test_inductor\.py\", line \d+, in layer.*no lowering", note)
    assert sim.peak_allocated == eager.peak_allocated


def test_the_buffers_are_those_of_inductor_on_a_cpu():
    """The same graph on this machine's CPU, compiled for real: products and element-wise chains fuse alike."""
    from torch._inductor.utils import run_and_get_code

    def function(x, w):
        return (((x @ w).relu() + 1) @ w).sigmoid()

    x, w = torch.randn(96, 128), torch.randn(128, 128)
    try:
        _, (code,) = run_and_get_code(torch.compile(function), x, w)
    except torch._inductor.exc.InvalidCxxCompiler:
        pytest.skip("Inductor needs a C++ compiler on a CPU")
    here = [eval(shape) for shape in re.findall(r"empty_strided_cpu\((\([^)]*\))", code)]
    torch._dynamo.reset()
    with simulator("A100-40GB") as sim:
        x, w = x.cuda(), w.cuda()
        since = len(sim._simulated.engine.events)
        torch.compile(function)(x, w)
        sizes = [event.size for event in sim._simulated.engine.events[since:] if event.size > 0]
    workspace = 8519680  # cuBLAS's
    assert [size for size in sizes if size != workspace] == [4 * rows * columns for rows, columns in here]


@pytest.fixture
def graphs(monkeypatch):
    """Of each graph that inductor compiles, whether it is of a backward pass."""
    from torch._inductor import compile_fx

    compiled = []
    real = compile_fx.compile_fx_inner

    def counted(*args, **options):
        compiled.append(bool(options.get("is_backward")))
        return real(*args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", counted)
    return compiled


def test_lab_simulate_compiles_a_step_once(graphs):
    config = {**lab.model("gpt2").config, "n_layer": 1, "vocab_size": 1024}
    run = Training(micro_batch=4, seq_len=256, precision="autocast-bf16", accumulation=2)
    eager, compiled = (lab.simulate(config, replace(run, compile=choice), "A100") for choice in (False, True))
    assert graphs == [False, True]
    assert compiled.peak_allocated < 0.8 * eager.peak_allocated
    assert not [note for note in compiled.notes if note.code == "ran-eager"]
    assert compiled.flops == eager.flops


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_checkpointed_step_is_compiled_once(graphs, checkpointing):
    """Not for each micro-batch, whatever follows its modules: forward's graph and backward's, and no more."""
    config = {**lab.model("gpt2").config, "n_layer": 1, "vocab_size": 1024}
    lab.simulate(config, Training(1, 64, compile=True, checkpointing=checkpointing, accumulation=2), "A100")
    assert graphs == [False, True]


def test_nothing_of_it_stays():
    taken(torch.compile(chain), torch.zeros(2))
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._inductor import compile_fx

    assert CatchErrorsWrapper.__call__.__module__ == "torch._dynamo.convert_frame"
    assert compile_fx.compile_fx.__module__ == "torch._inductor.compile_fx"
    assert torch.equal(torch.compile(chain, backend="eager")(torch.zeros(2)), chain(torch.zeros(2)))
