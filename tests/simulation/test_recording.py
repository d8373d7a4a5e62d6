"""The module to which a recording attributes what runs."""

import torch
from torch import nn

from llmlab.simulation.allocator.memory import HostMemory
from llmlab.simulation.engine.engine import HOST, Engine
from llmlab.simulation.profile.recording import Recording


def test_the_innermost_module_that_runs_is_the_place():
    recording, seen = Recording(Engine(HOST, HostMemory())), []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(recording.path())
            return x

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Looks()

        def forward(self, x):
            x = self.inner(x)
            seen.append(recording.path())
            return x

    with recording.watched():
        nn.Sequential(Twice(), Looks())(torch.ones(1))
    assert seen == ["0.inner", "0", "1"] and recording.path() == ""


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.seen()
        return grad * 2, None


class Scaled(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(1)), seen

    def forward(self, x):
        return Scale.apply(x * self.weight, self.seen)


def test_backward_belongs_to_the_module_whose_forward_it_undoes_and_a_sum_of_gradients_to_its_parameters():
    recording, seen = Recording(Engine(HOST, HostMemory())), []

    def look(*_):
        seen.append(recording.path())

    model = nn.Sequential(Scaled(look), nn.Sequential(Scaled(look)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    with recording.watched():
        loss = Scale.apply(model(torch.ones(1)), look)
        loss.backward()
    assert seen == ["", "1.0", "1.0", "0", "0"]


def test_weights_gradients_and_states_are_their_modules():
    engine = Engine(HOST, HostMemory())
    recording = Recording(engine)
    with engine, recording.watched():
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        recording.own(model, optimizer)
        weight = model[0].weight
        momentum = optimizer.state[weight]["momentum_buffer"]
        for tensor in (weight, weight.grad, momentum):
            assert engine.places[engine._born[engine.address(tensor)]].module == "0"
