"""torchtune's block, its bytes written out by hand, and the peaks that its own code took."""

import pytest

import llmlab as lab
from llmlab.formulas.memory.moments import training_moments

LLAMA, TIED = lab.model("meta-llama/Meta-Llama-3-8B"), lab.model("meta-llama/Llama-3.2-3B")
H, F, Q, HEADS = 4096, 14336, 4096, 32
TOKENS = 8192
ALL = lab.LoRA(rank=8, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


def run(**given):
    return lab.Training(**{"seq_len": 4096, "micro_batch": 2, "stack": "torchtune", **given})


@pytest.mark.parametrize(("layers", "inputs"), [(2, 2), (4, 4), (9, 5)])
def test_offloaded_inputs_of_the_last_five_blocks_are_on_the_card_as_forward_ends(layers, inputs):
    """training/_activation_offloading.py, max_fwd_stash_size=5: a tensor that is being copied to the host waits."""
    spec = lab.model({**TIED.config, "num_hidden_layers": layers})
    moments = training_moments(spec, run(stack="torchtune:enable_activation_offloading=True"), None)
    (forward,) = (moment for moment in moments if moment.name == "the last block of forward")
    assert forward.parts["activations"] == inputs * TOKENS * TIED.hidden * 2


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
