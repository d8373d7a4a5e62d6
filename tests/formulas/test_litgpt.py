"""LitGPT's block, its bytes written out by hand, and what its recipes make of a run."""

import llmlab as lab
from llmlab.formulas.memory.activations import block_saved, per_device
from llmlab.formulas.memory.share import share_of

GROUPED, FULL = lab.model("meta-llama/Meta-Llama-3-8B"), lab.model("meta-llama/Llama-2-7b-hf")
TOKENS, HEADS, ALPACA = 1304, 32, 1304
Q, K, LOGITS = 4096, 1024, 4 * 32000


def kept(spec, **given):
    share = share_of(spec, lab.Training(**{"seq_len": ALPACA, "stack": "litgpt", **given}))
    return sum(per_device(block_saved(share), share.run).values())


def test_the_block_that_is_trained_whole():
    norms = 2 * (4 * Q + 4 + 4 * Q)  # in fp32, before and after 1/rms
    inputs = 2 * 2 * Q  # of qkv and of fc_1 and fc_2
    attention = 3 * 2 * Q + 2 * 2 * Q + 4 * HEADS  # keys and values of all heads; the output twice
    assert kept(GROUPED) == TOKENS * (norms + inputs + attention + 4 * 2 * 14336)


def test_where_every_head_has_its_keys_the_values_hold_on_to_queries_and_keys():
    assert kept(FULL) - kept(FULL, lora=lab.LoRA(targets=("q_proj", "k_proj", "v_proj"))) == TOKENS * (
        2 * 4 * Q + 2 * Q + 2 * Q + 2 * 11008 - 2 * 16 * 3
    )
    norms, inputs = 2 * (4 * Q + 4 + 4 * Q), 2 * 2 * Q
    attention = 2 * 2 * Q + 3 * 2 * Q + 2 * 2 * Q + 4 * HEADS
    assert kept(FULL) == TOKENS * (norms + inputs + attention + 4 * 2 * 11008)


def test_adapters_of_some_of_q_k_and_v_are_copied_into_zeros():
    some, every = (lab.LoRA(rank=8, targets=names) for names in (("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")))
    assert kept(GROUPED, lora=some) - kept(GROUPED, lora=every) == TOKENS * (2 * (Q + K) - 2 * 8)


def test_dropout_keeps_its_mask_beside_what_it_made():
    plain, dropped = (lab.LoRA(rank=8, targets=("q_proj", "v_proj"), dropout=rate) for rate in (0, 0.1))
    assert kept(GROUPED, lora=dropped) - kept(GROUPED, lora=plain) == TOKENS * Q


def peak(phase, **given):
    run = lab.Training(**{"seq_len": ALPACA, "stack": "litgpt", **given})
    return lab.estimate(FULL, run, "A100-80GB").phases[phase]


def test_several_sequences_copy_the_logits_once_more():
    one, two = peak("forward"), peak("forward", micro_batch=2)
    per_sequence = 32 * kept(FULL) + TOKENS * (2 * 4 * Q + 4 + 2 * Q)
    assert two - one == per_sequence + TOKENS * LOGITS * (2 * 3 - 2)


def test_without_reductions_each_rank_sums_whole_gradients():
    """And the last micro-batch's logits have a name."""
    once, often = peak("forward", dp=8), peak("forward", dp=8, accumulation=4)
    assert often - once == 2 * FULL.parameters + TOKENS * LOGITS
