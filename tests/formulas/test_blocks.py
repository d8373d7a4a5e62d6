"""Which stacks' blocks are described."""

import pytest

import llmlab as lab
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.stacks import litgpt, megatron, nanotron, torchtitan, torchtune
from llmlab.formulas.memory.stacks.blocks import block_of

LLAMA = lab.model("meta-llama/Meta-Llama-3-8B")


@pytest.mark.parametrize("module", [litgpt, megatron, nanotron, torchtitan, torchtune], ids=lambda m: m.__name__[-9:])
def test_a_stack_with_layers_of_its_own_has_the_block_of_its_module(module):
    share = share_of(LLAMA, lab.Training(seq_len=1024, dp=8, stack=module.__name__.rpartition(".")[2]))
    assert block_of(share) == module.block(share)


@pytest.mark.parametrize("stack", ["transformers", "deepspeed"])
def test_hugging_faces_classes_are_described_by_code(stack):
    assert block_of(share_of(LLAMA, lab.Training(seq_len=1024, dp=8, stack=stack))) is None
