"""Models of transformers with random weights, for the architectures from scratch."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture(scope="session")
def transformers_model():
    """Return a function that builds transformers' model of a config, whose weights are those of a seed."""

    def build(config, **changes):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**config, **changes})).eval()
        for parameter in model.parameters():  # biases and norms away from 0 and 1, or a forgotten one would not show
            torch.nn.init.normal_(parameter, std=0.2)
        return model

    return build


@pytest.fixture(scope="session")
def ids():
    return torch.randint(300, (3, 40), generator=torch.Generator().manual_seed(1))
