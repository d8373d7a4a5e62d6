"""The bytes of rank 0 in each phase of a step, by formula and by simulation, under each kind of parallelism.

Those that `simulate` has no engine for (pipelines, context, experts) are in test_by_hand.py.
"""

import pytest

import llmlab as lab
from llmlab.formulas.memory.moments import training_moments

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 1408, "vocab_size": 16000,
         "max_position_embeddings": 1024}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True}
GPT = {"model_type": "gpt2", "n_embd": 512, "n_head": 8, "n_layer": 3, "n_positions": 1024, "vocab_size": 16000}
SEQUENCE = {"tp": 4, "sequence_parallel": True, "seq_len": 1024}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {**MIXTRAL, "model_type": "qwen3_moe", "num_local_experts": 16, "num_experts_per_tok": 8, "vocab_size": 1000,
           "moe_intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 16}  # fmt: skip
# What Accelerate's and the Trainer's own default is: FSDP2 reduces gradients after the last micro-batch.
WAITS = {"zero": 3, "accumulation": 2, "sync_each_batch": False}
ADAPTERS = lab.LoRA(rank=64, targets=("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"))


@pytest.mark.parametrize("method", ["sft", "ppo"])
def test_loaded_models_have_no_optimizer_states_yet(method):
    run = lab.Training(method=method, **({"completion_len": 64, "generations": 1} if method == "ppo" else {}))
    loaded = [moment.parts["optimizer"] for moment in training_moments(lab.model(LLAMA), run, None)
              if moment.phase == "load"]  # fmt: skip
    assert loaded and not any(loaded)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA, {"zero": 2, "precision": "bf16", "dp": 8}),
        (TIED, {"zero": 2, "precision": "autocast-bf16", "dp": 8, "accumulation": 2, "checkpointing": "full"}),
        (LLAMA, {"zero": 3, "precision": "mixed-bf16", "dp": 4, "checkpointing": "full"}),
        (TIED, {"zero": 3, "precision": "bf16", "dp": 8, "tp": 4}),
        (LLAMA, {"zero": 3, "precision": "bf16", "dp": 8, **SEQUENCE}),
        (LLAMA, {"zero": 2, "precision": "mixed-bf16", "dp": 4, "checkpointing": "selective", **SEQUENCE}),
        (LLAMA, {"zero": 2, "precision": "bf16", "dp": 8, "dp_replicate": 2}),
        (LLAMA, {"zero": 3, "precision": "mixed-bf16", "dp": 16, "dp_replicate": 4, "accumulation": 2,
                 "checkpointing": "full"}),
        (LLAMA, {"zero": 3, "precision": "bf16", "dp": 8, "dp_replicate": 2, "tp": 4}),
        (LLAMA, {"precision": "bf16", **SEQUENCE}),
        (LLAMA, {"precision": "bf16", "checkpointing": "selective", **SEQUENCE}),
        (TIED, {"precision": "autocast-bf16", **SEQUENCE}),
        (LLAMA, {"zero": 0, "precision": "bf16", "tp": 4}),
        (GPT, {"zero": 0, "precision": "autocast-bf16", "dp": 8, "accumulation": 2, "seq_len": 1024}),
        (LLAMA, {"zero": 1, "precision": "bf16", "dp": 8, "seq_len": 1024}),
        (TIED, {"zero": 1, "precision": "autocast-bf16", "dp": 8, "seq_len": 1024}),
        (LLAMA, {"precision": "autocast-bf16", "offload": "optimizer", "seq_len": 1024}),
        (MIXTRAL, {"zero": 2, "precision": "fp32", "dp": 16}),  # more ranks than experts
        (EXPERTS, {"precision": "bf16", "seq_len": 1024}),
        (EXPERTS, {"precision": "mixed-bf16", "seq_len": 1024, "checkpointing": "selective", "zero": 3, "dp": 2}),
        (EXPERTS, {"precision": "bf16", "seq_len": 1024, "lora": lab.LoRA(rank=64)}),
        (LLAMA, {**WAITS, "precision": "mixed-bf16", "dp": 2}),
        (TIED, {**WAITS, "precision": "mixed-bf16", "dp": 8, "accumulation": 3, "checkpointing": "full"}),
        (LLAMA, {**WAITS, "precision": "mixed-bf16", "dp": 8, "zero": 2, "accumulation": 3}),
        (LLAMA, {**WAITS, "precision": "mixed-bf16", "dp": 16, "dp_replicate": 4, "checkpointing": "full"}),
        (LLAMA, {**WAITS, "precision": "bf16", "dp": 2, "accumulation": 3}),
        (TIED, {**WAITS, "precision": "bf16", "dp": 8, "checkpointing": "full"}),
        (GPT, {**WAITS, "precision": "fp32", "dp": 8, "seq_len": 1024, "checkpointing": "full"}),
        (LLAMA, {**WAITS, "precision": "fp32", "dp": 8, "accumulation": 3, "checkpointing": "full"}),
        (LLAMA, {**WAITS, "precision": "mixed-bf16", "reduce_dtype": "bf16", "dp": 8, "checkpointing": "full"}),
        (LLAMA, {"zero": 3, "precision": "mixed-bf16", "reduce_dtype": "bf16", "dp": 2}),
        (LLAMA, {**WAITS, "precision": "bf16", "dp": 8, "lora": ADAPTERS}),
        (LLAMA, {**WAITS, "precision": "mixed-bf16", "dp": 2, "accumulation": 3, "lora": ADAPTERS}),
    ],
    ids=["zero 2", "zero 2, tied", "zero 3, mixed", "zero 3, tp, tied", "zero 3, sequence", "zero 2, sequence",
         "hsdp", "hsdp, accumulated", "hsdp, tp", "sequence", "sequence, selective", "sequence, tied", "tp",
         "ddp", "zero 1", "zero 1, tied", "offload", "zero 2, experts",
         "experts", "experts, selective", "experts, lora", "waits, mixed", "waits, mixed, tied",
         "waits, zero 2", "waits, hsdp", "waits, bf16", "waits, bf16, tied", "waits, fp32, gpt", "waits, fp32",
         "waits, half", "half", "waits, lora", "waits, lora, mixed"],
)
def test_rank_0_holds_in_each_phase_what_the_simulator_finds(config, settings, agree):
    """Some with few tokens, so that what is gathered and reduced is most of it; some with more, for what is kept."""
    run = lab.Training(**{"seq_len": 256, **settings})
    estimate, simulation = agree(config, run, "H100-80GB")
    for phase in ("forward", "backward", "optimizer"):
        assert estimate.phases[phase] == pytest.approx(simulation.phases[phase], rel=0.04), phase


def test_the_first_norm_of_a_block_ends_its_backward_pass_beside_all_gradients_of_the_block(agree):
    """Mistral 7B's proportions: the fp32 tensors of a norm in several operators decide the peak of FSDP2."""
    config = {**LLAMA, "num_hidden_layers": 6, "num_key_value_heads": 2, "intermediate_size": 1792, "vocab_size": 4000}
    run = lab.Training(1, 128, "mixed-bf16", zero=3, dp=8)
    estimate, simulation = agree(config, run, "H100-80GB")
    assert estimate.peak_allocated == pytest.approx(simulation.peak_allocated, rel=0.006)
