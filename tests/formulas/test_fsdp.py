"""What a rank of FSDP2 holds, and for how long: shards, whole weights, whole gradients."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.memory.states import states, unsplit

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 1408, "vocab_size": 16000,
         "max_position_embeddings": 1024}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


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


def test_what_is_outside_of_blocks_is_gathered_again_before_the_losss_gradient():
    """Told to free after forward, fully_shard frees the whole model's unit too: twice its bytes, and kept logits."""
    run = lab.Training(seq_len=64, precision="fp32", dp=8, zero=3, accumulation=2, checkpointing="full")
    spec = lab.model(LLAMA)
    again = next(moment for moment in training_moments(spec, run, None) if moment.name.endswith("gathered again"))
    assert again.parts["other"] == 2 * 4 * (2 * spec.vocab * spec.hidden)
    assert again.parts["logits"] == 64 * spec.vocab * (4 + 4)
    report = lab.simulate(LLAMA, replace(run, seq_len=256, dp=2, checkpointing=None), "H100-80GB")
    guess = lab.estimate(LLAMA, replace(run, seq_len=256, dp=2, checkpointing=None), "H100-80GB")
    assert guess.peak_allocated == pytest.approx(report.peak_allocated, rel=0.025)


def test_a_shard_takes_what_little_it_leaves_of_its_segment():
    """22 layers' w1, w2 and w3: 11 MiB on a rank, of a segment of 12, which is not cut, unless it can be expanded."""
    tiny = lab.model("TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    more = 22 * 3 * 2**20
    assert unsplit(tiny, lab.Training(dp=2, stack="torchtune:optimizer=AdamW")) == (more, 2 * more)
    assert unsplit(tiny, lab.Training(dp=2, stack="torchtune:optimizer=AdamW8bit")) == (more, 0)
    assert unsplit(tiny, lab.Training(dp=4, zero=3, precision="mixed-bf16")) == (more, 2 * more)
    assert unsplit(tiny, lab.Training(dp=4, stack="torchtitan")) == (0, 0)
    assert unsplit(tiny, lab.Training(dp=2, zero=1, precision="mixed-bf16", stack="deepspeed")) == (0, 0)


def test_states_that_the_first_update_makes_fill_what_the_step_left_free():
    """What does not fit is in segments of its own; made in backward, all of it. More tokens leave more free."""
    tiny, more = lab.model("TinyLlama/TinyLlama-1.1B-Chat-v1.0"), 2 * 22 * 3 * 2**20

    def beyond(seq_len: int, in_backward: bool) -> int:
        given = f"torchtune:optimizer=AdamW,optimizer_in_bwd={in_backward}"
        run = lab.Training(seq_len=seq_len, micro_batch=2, dp=2, stack=given)
        return training_moments(tiny, run, None)[-1].parts["optimizer"] - states(tiny, run).optimizer

    assert beyond(512, True) == beyond(2048, True) == more
    few, many = beyond(512, False), beyond(2048, False)
    # Of 512 tokens a step leaves a few hundred MiB, of states of 2 GiB.
    assert 0.6 * more < few < 0.9 * more and 0 <= many < 0.8 * few


def test_the_first_states_lie_where_the_simulated_ones_do():
    """11 MiB each, of six layers, where the simulator's allocator has put them."""
    config = {**LLAMA, "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6,
              "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
    guess, found = (verb(config, lab.Training(seq_len=32), "A100-80GB") for verb in (lab.estimate, lab.simulate))
    for part, exact in (("weights", 6 * 3), ("optimizer", 2 * 6 * 3)):
        assert guess.parts[part] == pytest.approx(found.parts[part], abs=0.3 * exact * 2**20)


def test_weights_that_are_gathered_in_fp8_take_a_byte_less_each():
    """In a model that stays gathered, at the loss: the linear layers of all its blocks."""
    spec, parts = lab.model(LLAMA), []
    for gathers in (True, False):
        stack = f"torchtitan:reshard_after_forward=never,enable_fsdp_float8_all_gather={gathers},ac=none"
        run = lab.Training(seq_len=64, dp=8, compile=True, fp8="tensorwise", stack=stack)
        moments = {moment.name: moment.parts for moment in training_moments(spec, run, lab.gpu("H100"))}
        parts.append(moments["the loss"]["weights"])
    assert parts[1] - parts[0] == spec.block_linear_elements
