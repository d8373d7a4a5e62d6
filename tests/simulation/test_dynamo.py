"""torch.compile's tracer on a simulated GPU."""

import pytest
import torch
from torch import nn

from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFloat32")


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
