"""The host's time of a generated token: operators counted on transformers' classes, and runs on GPUs."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import llmlab as lab
from llmlab.archive import figure
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.host import (
    GENERATING,
    GENERATING_ENDS,
    GENERATING_NORM,
    Operators,
    generation_host_seconds,
)
from llmlab.formulas.time.step import token_seconds

VIEWS = {"view", "_unsafe_view", "transpose", "t", "expand", "slice", "unsqueeze", "select", "alias", "split"}
LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
         "max_position_embeddings": 64}  # fmt: skip
GPT2 = {"n_embd": 64, "n_head": 4, "n_positions": 64}


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.kernels, self.views = 0, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in VIEWS:
            self.views += 1
        else:
            self.kernels += 1
        return operator(*args, **(kwargs or {}))


def of_a_token(family, layers):
    """Return the operators that one more token takes in generate()."""
    sizes = {**GPT2, "n_layer": layers} if family == "gpt2" else {**LLAMA, "num_hidden_layers": layers}
    config = AutoConfig.for_model(family, **sizes, vocab_size=64, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids, counts = torch.zeros(1, 4, dtype=torch.long), Counter()
    for new, sign in ((4, -1), (6, 1)):
        with Counting() as found:
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                           do_sample=False, pad_token_id=0)  # fmt: skip
        counts["kernels"] += sign * found.kernels
        counts["views"] += sign * found.views
    return Operators(counts["kernels"] / 2, counts["views"] / 2, 0, 0)


@pytest.mark.parametrize(("family", "norm", "more"), [("llama", "rmsnorm", 0), ("qwen2", "rmsnorm", 0),
                                                      ("qwen3", "rmsnorm", 2), ("gpt2", "layernorm", 0)])  # fmt: skip
def test_operators_of_a_token(family, norm, more):
    two, four = of_a_token(family, 2), of_a_token(family, 4)
    block = four.plus(two.times(-1)).times(1 / 2)
    assert block == GENERATING[norm].plus(GENERATING_NORM.times(more))
    assert two.plus(block.times(-2)) == GENERATING_ENDS[norm]


def test_a_generation_of_gpt2_on_an_h200():
    """Nobody timed an H200's host; the A100's stands for it, in training as well."""
    (record,) = [one for one in lab.records("gpt2", gpu="H200") if isinstance(one.run, lab.Inference)]
    predicted = record.run.new_tokens * generation_host_seconds(lab.model("gpt2"), efficiency("A100-80GB"))
    assert predicted == pytest.approx(record.step_seconds, rel=0.15)


def test_a_generation_of_qwen_on_an_a100():
    run = lab.Inference(prompt_len=6144, new_tokens=2048)
    _, each = token_seconds(lab.model("Qwen/Qwen2.5-7B"), run, efficiency("A100-80GB"))
    assert 1 / each == pytest.approx(figure("qwen2.5-7b-generate")["6144"], rel=0.15)
