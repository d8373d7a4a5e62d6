"""What a training method adds to a step's memory."""

import pytest

import llmlab as lab
from llmlab.formulas.memory.methods import copies, loss_bytes, offloaded, other_models, value_run
from llmlab.formulas.memory.share import share_of

GPT2 = lab.model("gpt2")
LLAMA = lab.model("meta-llama/Llama-3.1-8B")


def run_of(method, **fields):
    return lab.Training(**{"method": method, "micro_batch": 2, "seq_len": 512, "precision": "bf16", **fields})


@pytest.mark.parametrize(("fields", "bytes_of_parameter"), [
    ({}, 2), ({"dp": 4, "zero": 3}, 2 / 4), ({"dp": 4, "zero": 2}, 2), ({"precision": "fp32"}, 4),
    ({"dp": 4, "zero": 2, "precision": "mixed-bf16"}, 4),  # FSDP2's shards are fp32, and stay gathered
    ({"dp": 4, "zero": 3, "precision": "mixed-bf16"}, 4 / 4),
    ({"dp": 4, "zero": 3, "dp_replicate": 2}, 2 / 2),
    ({"reference": "precomputed"}, 0), ({"reference": "offloaded"}, 0), ({"lora": lab.LoRA()}, 0),
])  # fmt: skip
def test_a_frozen_reference_model_is_sharded_as_the_trained_one(fields, bytes_of_parameter):
    run = run_of("dpo", **fields)
    assert copies(LLAMA, run) == bytes_of_parameter * LLAMA.parameters
    assert offloaded(LLAMA, run) == (2 * LLAMA.parameters if run.reference == "offloaded" else 0)


def test_a_teacher_has_its_own_size_and_a_reward_model_no_head():
    assert copies(LLAMA, run_of("distill", teacher="gpt2")) == 2 * GPT2.parameters
    ppo = run_of("ppo", completion_len=8, generations=1, lora=lab.LoRA())  # its reference is the model without adapters
    assert copies(LLAMA, ppo) == 2 * (LLAMA.parameters - 128_256 * 4096)
    assert [other.scores for other in other_models(LLAMA, ppo)].count(False) == 1 and value_run(ppo).lora is None


def test_the_bytes_of_whole_and_chunked_logits():
    """ORPO: logits of pairs, a copy of half of them and its log_softmax. A teacher: nine tensors, then four gradients.
    DPO: a tile of 2,048 rows, and in fp32 and bf16 the gradients of the hidden states and of the head."""
    logits, rows = 2 * 512 * 50257, 2 * 2 * 512
    assert loss_bytes(share_of(GPT2, run_of("orpo"))) == (2 * logits * 4, 2 * logits * 5, 2 * logits * 2)
    assert loss_bytes(share_of(GPT2, run_of("distill"))) == (18 * logits, 8 * logits, 2 * logits)
    tile, gradients = 2 * rows * 32768, (4 + 2) * (rows + 50257) * 768
    assert loss_bytes(share_of(GPT2, run_of("dpo"))) == (tile, tile + gradients, 0)
    frozen = run_of("dpo", lora=lab.LoRA(targets=("c_attn",)))  # of the head no gradient
    assert loss_bytes(share_of(GPT2, frozen))[1] <= tile + (4 + 2) * rows * 768
    assert loss_bytes(share_of(GPT2, run_of("sft"))) is None
