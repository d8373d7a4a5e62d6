"""Of the libraries' loops, the Trainer's is exact, and Accelerate's is if the script divides by the tokens."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmlab.course.experiments.accumulation import accelerate_gradient, trainer_gradient
from llmlab.course.techniques.accumulation import backward_exact, backward_of_means, difference, gradient, pad

CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
FP32 = 2e-5  # of the gradient's norm


@pytest.fixture(autouse=True)
def own_state_of_accelerate():
    """Accelerate keeps one state per process: another test's precision would be this one's."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("lengths", [(2, 24, 3, 20), (12, 12)], ids=["unequal lengths", "a short group"])
def test_which_loop_has_the_gradient_of_the_whole_group(lengths):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    sequences = [torch.randint(1, 64, (length,)) for length in lengths]
    backward_exact(model, [pad(sequences)])
    whole = gradient(model)
    of_accelerate = accelerate_gradient(model, sequences, 4)
    assert difference(of_accelerate, whole) > 0.1
    backward_of_means(model, [pad([sequence]) for sequence in sequences], steps=4)
    assert difference(gradient(model), of_accelerate) < FP32  # a mean of means, of a short group too
    assert difference(accelerate_gradient(model, sequences, 4, by_tokens=True), whole) < FP32
    assert difference(trainer_gradient(model, sequences, 4), whole) < FP32
