"""Parameters on the host are fake."""

import pytest
import torch
from torch import nn

from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")
transformers = pytest.importorskip("transformers")


def test_parameters_are_made_of_the_class_that_one_had():
    accelerate = pytest.importorskip("accelerate")
    with simulator("T4") as sim:
        with accelerate.init_empty_weights():
            model = nn.Linear(8, 8, bias=False)
        accelerate.utils.set_module_tensor_to_device(model, "weight", "cpu", value=torch.randn(8, 8))
        assert isinstance(model.weight, nn.Parameter) and sim.allocated == 0
        model.cuda()
        assert sim.allocated == 512


def test_parameters_of_before_are_fake_until_the_end_and_train_as_before():
    model = nn.Linear(8, 8)
    real = model.weight
    model.bias.requires_grad_(False)
    with simulator("T4"):
        model.cuda()
        assert model.weight is not real and model.weight.requires_grad and not model.bias.requires_grad
    assert model.weight is real


def test_models_whose_initialization_looks_at_values_are_made():
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                                    image_size=32, patch_size=8)  # fmt: skip
    with simulator("T4"):
        model = transformers.ViTForImageClassification(config).cuda()
        pixels, labels = torch.randn(2, 3, 32, 32, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
        model(pixel_values=pixels, labels=labels).loss.backward()
