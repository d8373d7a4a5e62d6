"""What Dynamo compiles, and how often."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llmlab as lab
from llmlab import Training
from llmlab.simulation.simulator import simulator

pytest.importorskip("triton")
pytestmark = [pytest.mark.usefixtures("no_gpu"), pytest.mark.filterwarnings("ignore:.*TensorFloat32")]

MiB = 2**20


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


def test_a_module_with_a_hook_is_compiled_once():
    """Dynamo guards all modules' hooks where one has its own; the simulator's are among those, and not as it traces."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with simulator("A100-40GB"):
        model = nn.Sequential(nn.Linear(8, 8)).cuda()
        model[0].register_forward_pre_hook(lambda module, args: None)
        compiled, x = torch.compile(model, backend=backend), torch.zeros(4, 8, device="cuda")
        for _ in range(3):
            compiled(x)
    assert len(graphs) == 1


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


@pytest.mark.parametrize("checkpointing", [None, "full", "selective"])
def test_a_step_is_compiled_once(monkeypatch, checkpointing):
    """Not for each micro-batch, whatever follows its modules: forward's graph and backward's, and no more."""
    from torch._inductor import compile_fx

    compiled = []
    real = compile_fx.compile_fx_inner

    def counted(*args, **options):
        compiled.append(bool(options.get("is_backward")))
        return real(*args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", counted)
    config = {**lab.model("gpt2").config, "n_layer": 1, "vocab_size": 1024}
    lab.simulate(config, Training(1, 64, compile=True, checkpointing=checkpointing, accumulation=2), "A100")
    assert compiled == [False, True]


def test_nothing_of_it_stays():
    taken(torch.compile(chain), torch.zeros(2))
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._inductor import compile_fx

    assert CatchErrorsWrapper.__call__.__module__ == "torch._dynamo.convert_frame"
    assert compile_fx.compile_fx.__module__ == "torch._inductor.compile_fx"
    assert torch.equal(torch.compile(chain, backend="eager")(torch.zeros(2)), chain(torch.zeros(2)))
