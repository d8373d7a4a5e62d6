"""Gradients at each moment of the backward pass."""

import pytest

import llmlab as lab
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.memory.states import states

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 1408, "vocab_size": 16000,
         "max_position_embeddings": 1024}  # fmt: skip
GPT = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "vocab_size": 1000}


def test_offloaded_gradients_have_left_before_the_update():
    """One is on its way at a time, half as it is; the update has neither gradients nor states on the device."""
    run = lab.Training(precision="mixed-bf16", offload="optimizer", seq_len=16, checkpointing="full", accumulation=2)
    spec = lab.model("meta-llama/Llama-3.2-1B")
    moments = training_moments(spec, run, None)
    assert max(moment.parts.get("gradients", 0) for moment in moments) == 2 * spec.vocab * spec.hidden
    assert moments[-1].parts["gradients"] == moments[-1].parts["optimizer"] == 0


def test_gradients_of_accumulated_batches_live_through_forward():
    once = lab.estimate(GPT, lab.Training(accumulation=1, seq_len=64)).phases["forward"]
    more = lab.estimate(GPT, lab.Training(accumulation=2, seq_len=64)).phases["forward"]
    assert more - once == 4 * lab.model(GPT).parameters


def test_zero_1_with_a_master_copy_has_no_buckets():
    """It is DeepSpeed or Megatron-LM, whose gradients lie in one buffer from the start."""
    held = 2 * lab.model(GPT).parameters
    for zero, precision, times in ((0, "bf16", 2), (0, "mixed-bf16", 2), (1, "bf16", 2), (1, "mixed-bf16", 1)):
        loaded = lab.estimate(GPT, lab.Training(seq_len=64, dp=4, zero=zero, precision=precision)).phases["load"]
        assert loaded == times * held


def test_the_gradient_of_an_embedding_cut_by_rows_is_the_whole_tables():
    """torch/distributed/tensor/_ops/_embedding_ops.py; untied and without FSDP2 it stays so until the update."""
    spec = lab.model(LLAMA)
    table = 2 * spec.vocab * spec.hidden
    run = lab.Training(seq_len=64, precision="bf16", optimizer="sgd", tp=4)
    moments = {moment.name: moment.parts for moment in training_moments(spec, run, None)}
    gradients = states(spec, run).gradients
    assert moments["the embedding's gradient"]["gradients"] == gradients + table - table // 4
    assert moments["the update"]["other"] == table  # and its part, cut out of it


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_cut_by_rows_waits_whole_unless_its_head_is_tied(tied, agree):
    """Of a tied weight the sum of both gradients is cut before it is stored."""
    model = {**LLAMA, "vocab_size": 64_000, "tie_word_embeddings": tied}
    run = lab.Training(seq_len=64, precision="mixed-bf16", checkpointing="full", zero=3, dp=8, tp=4, accumulation=3,
                       sync_each_batch=False)  # fmt: skip
    agree(model, run, "H100-80GB")


def test_the_head_gradient_is_there_before_the_blocks():
    spec = lab.model(LLAMA)
    run = lab.Training(seq_len=16, precision="autocast-bf16", optimizer="sgd")
    moments = {moment.name: moment for moment in training_moments(spec, run, None)}
    head = spec.vocab * spec.hidden
    assert moments["the head's gradient"].parts["gradients"] == (4 + 2) * head  # and what it was cast from
    assert moments["the first block of backward"].parts["gradients"] >= 4 * head
    assert moments["the head's gradient"].total > moments["the gradient of the logits"].total


@pytest.mark.parametrize(
    ("precision", "reduced", "each", "kept"),
    [("mixed-bf16", "fp32", 4, 4), ("mixed-bf16", "bf16", 2, 4), ("bf16", "fp32", 2, 2), ("fp32", "fp32", 4, 4)],
)
def test_without_a_reduction_after_each_micro_batch_gradients_are_whole(precision, reduced, each, kept):
    """In the dtype in which they are reduced, from the second forward to the last backward; then there are shards."""
    spec = lab.model(LLAMA)
    runs = [lab.Training(seq_len=64, precision=precision, dp=8, zero=3, accumulation=3, sync_each_batch=sync,
                         reduce_dtype=reduced) for sync in (True, False)]  # fmt: skip
    sharded, whole = ({moment.name: moment.parts["gradients"] for moment in training_moments(spec, run, None)}
                      for run in runs)  # fmt: skip
    assert sharded["the loss"] == kept * spec.parameters // 8
    assert whole["the loss"] == pytest.approx(each * spec.parameters, rel=1e-4)  # blocks of whole bytes
    table = spec.vocab * spec.hidden
    # What is of another dtype than the sum waits until the unit's backward is over; else autograd adds it at once.
    waiting = whole["the first block of backward"] - whole["the loss"]
    assert waiting >= 2 * table if precision == "mixed-bf16" and reduced == "fp32" else waiting == 0
    assert whole["the other gradients reduced"] == pytest.approx(
        each * 2 * table + kept * (spec.parameters - 2 * table) / 8, rel=1e-3
    )
    assert sharded["the update"] == whole["the update"] == kept * spec.parameters // 8


def test_whole_gradients_of_what_is_offloaded_stay_on_the_gpu():
    """FSDP2 copies to the host what it has reduced (_fsdp_collectives.py, foreach_reduce)."""
    spec = lab.model(LLAMA)
    run = {"seq_len": 64, "precision": "mixed-bf16", "dp": 8, "zero": 3, "accumulation": 2,
           "offload": "optimizer+parameters"}  # fmt: skip
    waits, each = (lab.estimate(spec, lab.Training(**run, sync_each_batch=sync), "H100-80GB") for sync in (False, True))
    assert waits.peak_allocated - each.peak_allocated > 3 * spec.parameters
