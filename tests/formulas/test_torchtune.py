"""torchtune's block, its bytes written out by hand, and the peaks that its own code took."""

import pytest

import llmlab as lab
from llmlab.formulas.memory.activations import block_saved, per_device
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.memory.share import share_of

LLAMA, TIED = lab.model("meta-llama/Meta-Llama-3-8B"), lab.model("meta-llama/Llama-3.2-3B")
H, F, Q, HEADS = 4096, 14336, 4096, 32
TOKENS = 8192
ALL = lab.LoRA(rank=8, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


def run(**given):
    return lab.Training(**{"seq_len": 4096, "micro_batch": 2, "stack": "torchtune", **given})


def kept(**given):
    share = share_of(LLAMA, run(**given))
    return sum(per_device(block_saved(share), share.run).values())


def test_nothing_recomputed():
    norms = 2 * (4 * H + 4 + 4 * H)  # in fp32, before and after 1/rms
    attention = 2 * H + 3 * 2 * Q + 2 * Q + 4 * HEADS  # keys and values of all heads
    assert kept() == TOKENS * (norms + attention + 2 * H + 4 * 2 * F)


def test_frozen_weights_need_no_normalized_tensor():
    assert kept() - kept(lora=ALL) == TOKENS * (2 * 4 * H - 2 * 8 * 6)


def test_packed_tokens_bring_their_rotation():
    assert kept(stack="torchtune:packed=True") - kept() == TOKENS * 2 * 4 * LLAMA.head_dim


def test_compiled_what_is_dequantized_stays_for_backward():
    given = {"lora": ALL, "compile": True, "stack": "torchtune:enable_activation_checkpointing=False"}
    assert kept(**given, quantization="nf4") - kept(**given) == 2 * LLAMA.block_linear_elements // LLAMA.layers


def peak(**given):
    return lab.estimate(TIED, run(**given), "A100-80GB").peak_allocated


def test_chunks_keep_one_cast_of_the_logits_instead_of_three():
    plain = "torchtune:optimizer=AdamW,optimizer_in_bwd=False"
    logits = 4 * TOKENS * TIED.vocab
    whole, chunked = peak(stack=plain + ",num_output_chunks=0"), peak(stack=plain)
    # One in fp32 is of 501 MiB, in a segment of 502 that is not split. What is free as states are made differs too.
    assert whole - chunked == pytest.approx(3 * logits - (logits // 2 + 9 * 502 * 2**20), abs=2**20)


@pytest.mark.parametrize(("layers", "inputs"), [(2, 2), (4, 4), (9, 5)])
def test_offloaded_inputs_of_the_last_five_blocks_are_on_the_card_as_forward_ends(layers, inputs):
    """training/_activation_offloading.py, max_fwd_stash_size=5: a tensor that is being copied to the host waits."""
    spec = lab.model({**TIED.config, "num_hidden_layers": layers})
    moments = training_moments(spec, run(stack="torchtune:enable_activation_offloading=True"), None)
    (forward,) = (moment for moment in moments if moment.name == "the last block of forward")
    assert forward.parts["activations"] == inputs * TOKENS * TIED.hidden * 2


def test_states_that_are_paged_leave_their_scales():
    paged, narrow = (lab.estimate(TIED, run(stack=f"torchtune:optimizer={name}"), "A100-80GB")
                     for name in ("PagedAdamW8bit", "AdamW8bit"))  # fmt: skip
    assert narrow.parts["optimizer"] - paged.parts["optimizer"] == 2 * TIED.parameters


def test_nf4_quantizes_its_scales_too():
    weights = lab.estimate(LLAMA, run(lora=ALL, quantization="nf4"), "A100-80GB").parts["weights"]
    blocks = LLAMA.block_linear_elements
    adapters = 2 * 8 * 32 * (2 * (H + Q) + (H + 1024) + 3 * (H + F))
    rest = 2 * (LLAMA.parameters - blocks)
    assert weights == blocks // 2 + blocks // 64 + 4 * (blocks // 64 // 256) + rest + adapters


@pytest.mark.parametrize(
    "model, given, simulated",  # GiB, lab.simulate with torchtune 0.6.1 and torch 2.13
    [
        (LLAMA, {}, 23.895),
        (LLAMA, {"stack": "torchtune:optimizer=AdamW,optimizer_in_bwd=False"}, 60.888),
        (LLAMA, {"seq_len": 512}, 18.625),
        (LLAMA, {"lora": ALL}, 23.582),
        (LLAMA, {"dp": 8}, 14.306),
        (LLAMA, {"dp": 8, "seq_len": 512}, 10.017),
        (LLAMA, {"dp": 8, "seq_len": 512, "stack": "torchtune:fsdp_reshard_after_forward=False"}, 23.996),
        (LLAMA, {"dp": 8, "seq_len": 512, "lora": ALL}, 12.072),
        (TIED, {"stack": "torchtune:optimizer=AdamW,enable_activation_offloading=True"}, 24.637),
        (TIED, {"seq_len": 512, "stack": "torchtune:optimizer=AdamW,optimizer_in_bwd=False"}, 24.758),
        (TIED, {"compile": True, "stack": "torchtune:optimizer=AdamW"}, 23.251),
        (LLAMA, {"seq_len": 2048, "lora": ALL, "quantization": "nf4", "compile": True}, 7.863),
        (TIED, {"seq_len": 512, "lora": ALL, "quantization": "nf4", "compile": True,
                "stack": "torchtune:enable_activation_checkpointing=False"}, 10.381),
    ],
)
def test_peaks_of_its_own_code(model, given, simulated):
    estimate = lab.estimate(model, run(**given), "A100-80GB")
    assert estimate.peak_allocated / 2**30 == pytest.approx(simulated, rel=0.006)


def test_at_the_final_norms_backward_one_block_is_gathered():
    """The head's backward gathers it; none beside it, as torchtune frees the whole model after forward."""
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
              "vocab_size": 1024, "max_position_embeddings": 2048, "tie_word_embeddings": False}  # fmt: skip
    run, other = lab.Training(dp=16, seq_len=512, stack="torchtune"), []
    for width in (2048, 4096):
        found = training_moments(lab.model({**config, "intermediate_size": width}), run, lab.gpu("A100-80GB"))
        other += [each.parts["other"] for each in found if each.name == "the final norm's backward"]
    assert other[1] - other[0] == 2 * 3 * 1024 * 2048
