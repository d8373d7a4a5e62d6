"""What each kind of parallelism holds, and FSDP2 for a while, phase by phase: formula beside simulation.

Those that `simulate` has no engine for (pipelines, context, experts) are in test_by_hand.py.
"""

import pytest

import llmlab as lab
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.memory.states import states

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 4, "intermediate_size": 1408, "vocab_size": 16000,
         "max_position_embeddings": 1024}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True}
GPT = {"model_type": "gpt2", "n_embd": 512, "n_head": 8, "n_layer": 4, "n_positions": 1024, "vocab_size": 16000}
SEQUENCE = {"tp": 4, "sequence_parallel": True, "seq_len": 1024}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2}


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
    ],
    ids=["zero 2", "zero 2, tied", "zero 3, mixed", "zero 3, tp, tied", "zero 3, sequence", "zero 2, sequence",
         "hsdp", "hsdp, accumulated", "hsdp, tp", "sequence", "sequence, selective", "sequence, tied", "tp",
         "ddp", "zero 1", "zero 1, tied", "offload", "zero 2, experts"],
)
def test_rank_0_holds_in_each_phase_what_the_simulator_finds(config, settings):
    """Some with few tokens, so that what is gathered and reduced is most of it; some with more, for what is kept."""
    run = lab.Training(**{"seq_len": 256, **settings})
    guess, found = (verb(config, run, "H100-80GB") for verb in (lab.estimate, lab.simulate))
    assert guess.peak_allocated == pytest.approx(found.peak_allocated, rel=0.02)
    for phase in ("forward", "backward", "optimizer"):
        assert guess.phases[phase] == pytest.approx(found.phases[phase], rel=0.04), phase


def test_blocks_that_stay_whole_lie_beside_the_shard():
    """reshard_after_forward=False: at the loss all weights, the last all-gather's output, and the shard."""
    spec = lab.model(LLAMA)
    run = lab.Training(seq_len=64, precision="bf16", optimizer="sgd", dp=8, zero=2)
    loss = next(moment for moment in training_moments(spec, run, None) if moment.name == "the loss")
    whole, block = 2 * spec.parameters, 2 * (spec.parameters - 2 * spec.vocab * spec.hidden) / spec.layers
    assert loss.parts["weights"] == whole // 8
    assert loss.parts["other"] == pytest.approx(whole + block, rel=1e-3)


def test_copies_of_a_shard_leave_each_rank_the_share_of_the_ranks_that_make_one():
    spec = lab.model(LLAMA)
    hybrid, sharded = (lab.Training(precision="bf16", zero=3, dp=dp, dp_replicate=dp // 4) for dp in (16, 4))
    assert states(spec, hybrid) == states(spec, sharded)


def test_mixed_precision_gathers_half_weights_of_the_master_copy():
    """FSDP2's MixedPrecisionPolicy: rank 0 has fp32 shards, which are the master copy, and no half ones."""
    spec = lab.model(LLAMA)
    run = lab.Training(seq_len=64, precision="mixed-bf16", dp=8, zero=3)
    moments = {moment.name: moment.parts for moment in training_moments(spec, run, None)}
    update = moments["the update"]
    assert update["weights"] == 0 and update["optimizer"] == 12 * spec.parameters // 8
    loaded = {part: size for part, size in moments["weights loaded"].items() if size}
    assert loaded == {"weights": 4 * spec.parameters // 8}
    assert update["gradients"] == 4 * spec.parameters // 8


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_rank_0_holds_a_whole_expert_however_many_ranks_there_are(ranks):
    """fully_shard cuts the first dimension, the experts: beyond as many ranks as experts, a share is not smaller."""
    spec = lab.model(MIXTRAL)
    held = states(spec, lab.Training(precision="bf16", dp=ranks, zero=3)).weights
    experts = spec.parameters_by_component["experts"]
    assert held == 2 * (experts // min(ranks, spec.experts)) + 2 * (spec.parameters - experts) // ranks


def test_the_gradient_of_an_embedding_cut_by_rows_is_the_whole_tables():
    """torch/distributed/tensor/_ops/_embedding_ops.py; untied and without FSDP2 it stays so until the update."""
    spec = lab.model(LLAMA)
    table = 2 * spec.vocab * spec.hidden
    run = lab.Training(seq_len=64, precision="bf16", optimizer="sgd", tp=4)
    moments = {moment.name: moment.parts for moment in training_moments(spec, run, None)}
    gradients = states(spec, run).gradients
    assert moments["the embedding's gradient"]["gradients"] == gradients + table - table // 4
    assert moments["the update"]["other"] == table  # and its part, cut out of it


def test_the_head_gradient_is_there_before_the_blocks():
    spec = lab.model(LLAMA)
    run = lab.Training(seq_len=16, precision="autocast-bf16", optimizer="sgd")
    moments = {moment.name: moment for moment in training_moments(spec, run, None)}
    head = spec.vocab * spec.hidden
    assert moments["the head's gradient"].parts["gradients"] == (4 + 2) * head  # and what it was cast from
    assert moments["the first block of backward"].parts["gradients"] >= 4 * head
    assert moments["the head's gradient"].total > moments["the loss's gradient"].total
