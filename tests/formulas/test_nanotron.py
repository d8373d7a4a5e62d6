"""nanotron's block, its gradients and its stages, written out by hand."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.memory.activations import block_saved, per_device
from llmlab.formulas.memory.gradients import bucket_bytes, gradients
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.states import states
from llmlab.formulas.memory.temporaries import LossBytes, loss_bytes
from llmlab.formulas.time import elementwise
from llmlab.formulas.time.data_parallel import data_parallel
from llmlab.formulas.time.kernels import kernels
from llmlab.hardware.links import cluster
from llmlab.specs.stages import layers_of

H, F, HEADS, V, TOKENS = 2048, 8192, 32, 131072, 4096
SIZES = {"hidden_size": H, "intermediate_size": F, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
         "num_hidden_layers": 16, "vocab_size": V, "max_position_embeddings": TOKENS}  # fmt: skip
LLAMA = lab.model({"model_type": "llama", "tie_word_embeddings": False, **SIZES})
RUN = lab.Training(seq_len=TOKENS, dp=8, zero=1, accumulation=4, stack="nanotron")
LAYER = 4 * H * H + 3 * H * F


def kept(**given):
    share = share_of(LLAMA, replace(RUN, **given))
    return sum(per_device(block_saved(share), share.run).values())


def test_a_block_keeps_all_of_qkv_with_rotated_queries_and_what_silu_returned():
    norms, inputs, attention, mlp = 2 * (2 * H + 4), 2 * 2 * H, 2 * (3 + 2 + 1) * H + 4 * HEADS, 2 * 4 * F
    assert kept() == TOKENS * (norms + inputs + attention + mlp)
    assert kept(tp=4, sequence_parallel=True) == kept() // 4
    whole = kept(tp=4, sequence_parallel=True, stack="nanotron:tp_recompute_allgather=False")
    assert whole == TOKENS * (norms + attention + mlp) // 4 + TOKENS * inputs
    grouped = lab.model({**LLAMA.config, "num_key_value_heads": 8})
    rows = per_device(block_saved(share_of(grouped, RUN)), RUN)
    assert rows["q, k, v"] == TOKENS * 2 * (H + 2 * H // 4)


def test_gradients_lie_in_fp32_beside_half_ones_and_without_zero_ddps_buckets():
    share = share_of(LLAMA, RUN)
    sizes = states(LLAMA, RUN)
    every = LLAMA.parameters
    found = gradients(share, sizes)
    assert (found.accumulated, found.update, found.update_casts) == (4 * every, 4 * every, 0)
    assert found.stored.after_blocks == 6 * every
    assert bucket_bytes(share, sizes) == 0
    unsharded = replace(RUN, zero=0)
    assert bucket_bytes(share_of(LLAMA, unsharded), states(LLAMA, unsharded)) == 2 * every
    assert sizes.optimizer == 12 * (every // 8)
    half = replace(RUN, stack="nanotron:accumulate_grad_in_fp32=False")
    assert gradients(share_of(LLAMA, half), sizes).accumulated == 2 * every
    assert bucket_bytes(share_of(LLAMA, half), sizes) == 2 * every


def test_of_an_embedding_cut_by_words_a_rank_has_its_part_of_the_gradient():
    run = replace(RUN, tp=8, accumulation=1)
    own, torch = (gradients(share_of(LLAMA, each), states(LLAMA, each)).stored.after_blocks
                  for each in (run, replace(run, stack="transformers")))  # fmt: skip
    assert own - 4 * LLAMA.parameters // 8 < torch < own  # the fp32 ones, and not what other ranks' words have


def test_the_loss_is_computed_in_place_of_the_logits_fp32_copy():
    logits = TOKENS * V // 2
    run = replace(RUN, tp=2, sequence_parallel=True)
    assert loss_bytes(share_of(LLAMA, run)) == LossBytes(8 * logits, 6 * logits, 2 * logits, 0)
    cut = replace(run, pp=2)
    assert loss_bytes(share_of(LLAMA, cut, stage=1)) == LossBytes(8 * logits, 6 * logits, 2 * logits, 0)


def test_a_stage_takes_layers_until_it_has_computed_its_share():
    """The head costs as much as 4 layers. The authors' jobs of this model have 10 layers, and 5, on the first of 2 and
    of 4 stages: 17.57 and 11.32 GiB are allocated in their update (bench_final2_mfu2.csv, tied, without ZeRO)."""
    assert V * H == 4 * LAYER
    assert layers_of(LLAMA, replace(RUN, dp=1, zero=0, pp=2)) == (10, 6)
    assert layers_of(LLAMA, replace(RUN, dp=1, zero=0, pp=3)) == (7, 7, 2)
    tied = lab.model({**LLAMA.config, "tie_word_embeddings": True})
    for stages, allocated in ((1, 25.07), (2, 17.57), (4, 11.32)):
        run = replace(RUN, zero=0, pp=stages)
        update = lab.estimate(tied, run, "H100-80GB").phases["optimizer"]
        assert update / 2**30 == pytest.approx(allocated, rel=0.01)


def test_after_zero_1s_update_all_weights_are_gathered_in_flat_copies():
    """The same jobs: 4 bytes per parameter and a shard beside weights, fp32 gradients and a share of the states."""
    every, run = LLAMA.parameters, replace(RUN, dp=64)
    update = lab.estimate(LLAMA, run, "H100-80GB").phases["optimizer"]
    assert update == pytest.approx((2 + 4 + 4 + 14 / 64) * every, rel=0.01)


def test_tensor_parallel_layers_wait_for_the_host():
    """TP 4 and 8 with one sequence: 4.35 to 4.9 ms per layer and micro-batch, whatever the model (the same jobs)."""
    for ranks in (4, 8):
        run = lab.Training(seq_len=TOKENS, accumulation=128, tp=ranks, sequence_parallel=True, stack="nanotron")
        seconds = lab.estimate(LLAMA, run, "H100-80GB").step_seconds
        assert 4.2e-3 < seconds / 128 / 16 < 5.2e-3


def test_sums_are_sent_in_fp32():
    """With ZeRO-1 the buffer is all-reduced when backward is over; without, DDP's buckets are, counted in half."""
    found, nodes = kernels("H100"), cluster("H100", "InfiniBand-NDR")
    every, seconds = LLAMA.parameters, {}
    for zero in (0, 1):
        for wide in (True, False):
            run = replace(RUN, zero=zero, stack=lab.Nanotron(accumulate_grad_in_fp32=wide))
            sent = data_parallel(LLAMA, run, nodes, found, 1.0, 0.3, ("data",), 2**25)
            reduced = (4 if wide else 2) * every * (2 if wide or not zero else 1)  # an all-reduce counts twice
            assert sent.bytes == reduced + (2 * every if zero else 0)
            seconds[zero, wide] = sent.exposed
    gather = found.collective("all-gather", 2 * every, nodes.group(8))
    reduce = found.collective("all-reduce", 4 * every, nodes.group(8))
    assert seconds[1, True] == pytest.approx(reduce + gather, rel=0.02)
    assert seconds[0, True] < reduce / 2  # most of it behind backward


def test_each_micro_batch_s_half_gradients_are_added_to_fp32_ones():
    assert elementwise.accumulated(LLAMA, RUN) == (2 + 4 + 4) * 4 * LLAMA.parameters


def test_it_is_estimated_and_not_simulated():
    report = lab.estimate(LLAMA, RUN, "H100-80GB")
    assert report.peak_allocated and report.step_seconds
    with pytest.raises(lab.NotAvailable, match=r"stack='nanotron' is not simulated; ask lab\.estimate"):
        lab.simulate(LLAMA, RUN, "H100-80GB")


def test_head_and_loss_may_be_stages_of_their_own():
    """A quarter of the cost is 5 layers. With 8 stages the last layer and the head share one, and the loss is alone."""
    assert layers_of(LLAMA, replace(RUN, dp=1, zero=0, pp=4)) == (5, 5, 5, 1)
    run = replace(RUN, dp=1, zero=0, pp=8)
    assert layers_of(LLAMA, run) == (3, 2, 3, 2, 3, 2, 0, 1)
    report = lab.estimate(LLAMA, run, "H100-80GB")
    assert report.peak_allocated and report.step_seconds
    assert states(LLAMA, run, stage=6).trained == 0
    deep = lab.model({**LLAMA.config, "num_hidden_layers": 8})  # the head costs a third of all
    assert layers_of(deep, replace(run, pp=3)) == (4, 4, 0)
    with pytest.raises(lab.SpecError, match=r"pp=16 leaves a stage .* 16 layers, because nanotron splits"):
        lab.estimate(LLAMA, replace(run, pp=16), "H100-80GB")
