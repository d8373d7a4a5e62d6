"""The memory of a compiled step, and of Liger's kernels: what one kernel for several operators does not keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab import Training
from llmlab.formulas.memory.activations import block_saved, checkpointed, per_device
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.memory.scores import backward_scores, causal_mask, kept_scores
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.temporaries import block_backward
from llmlab.formulas.report import assessed

A100 = lab.gpu("A100-80GB")
GPT = {"model_type": "gpt2", "n_layer": 2, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 2048,
       "activation_function": "gelu_new", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # fmt: skip
# Few words: the peak is in a block.
LLAMA = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 2, "intermediate_size": 2048, "max_position_embeddings": 2048, "vocab_size": 512,
         "tie_word_embeddings": False}  # fmt: skip
# pytorch/ao at 9acc9a4d, benchmarks/quantized_training/pretrain_llama2.py, "1B"; its README says 19.47 GB.
TORCHAO = {"model_type": "llama", "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24,
           "num_key_value_heads": 24, "intermediate_size": 6144, "max_position_embeddings": 2048, "vocab_size": 32_000,
           "tie_word_embeddings": False}  # fmt: skip


ALL = lab.LoRA(8, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
TIED = {**LLAMA, "vocab_size": 65_536, "tie_word_embeddings": True}
ACCUMULATED = {"precision": "autocast-bf16", "accumulation": 2, "optimizer": "sgd", "micro_batch": 1, "seq_len": 256}


@pytest.mark.parametrize(
    "model, run, gpu, far",
    [
        (GPT, {"precision": "autocast-bf16"}, "A100-80GB", 0.03),
        (LLAMA, {"precision": "bf16"}, "A100-80GB", 0.05),
        (LLAMA, {"precision": "bf16", "checkpointing": "full"}, "A100-80GB", 0.10),  # a mask of all heads
        (LLAMA, {"precision": "bf16", "checkpointing": "full"}, "H100", 0.03),  # one that is kept
        (LLAMA, {"precision": "bf16", "lora": lab.LoRA(8)}, "A100-80GB", 0.03),
        (LLAMA, {"precision": "bf16", "lora": lab.LoRA(8, targets=("down_proj",))}, "A100-80GB", 0.03),
        (LLAMA, {"precision": "bf16", "attention": "eager", "micro_batch": 8}, "A100-80GB", 0.03),
        (TIED, {"precision": "bf16", "checkpointing": "full", "micro_batch": 1}, "A100-80GB", 0.03),  # its head last
        (TIED, ACCUMULATED, "A100-80GB", 0.02),  # a graph's gradients beside earlier ones, of a tied head two and a sum
    ],
)
@pytest.mark.filterwarnings("ignore:.*TensorFloat32")
def test_a_compiled_step_is_counted_as_inductor_compiles_it(model, run, gpu, far):
    pytest.importorskip("triton")
    run = Training(**{"micro_batch": 16, "seq_len": 1024, "compile": True, **run})
    simulated = lab.simulate(model, run, gpu)
    assert not [note for note in simulated.notes if note.code == "ran-eager"]
    assert lab.estimate(model, run, gpu).peak_allocated == pytest.approx(simulated.peak_allocated, rel=far)


def test_a_published_peak_of_a_step_that_is_compiled_with_its_loss():
    """Blocks' inputs, the states, and two copies of the logits: nothing of a loss in fp32."""
    run = Training(32, 2048, "bf16", checkpointing="full", compile=True, attention="flash", kernels="fused-loss")
    moments = {each.name: each.total for each in training_moments(lab.model(TORCHAO), run, None)}
    assert moments["the gradient of the logits"] == pytest.approx(19.47e9, rel=0.01)


def kept(run, model=LLAMA):
    return {(each.kind, each.bytes) for each in block_saved(share_of(lab.model(model), run, A100))}


def test_norms_and_activations_keep_what_they_read():
    T, h, f = 8 * 1024, 512, 2048
    for more in ({"compile": True}, {"kernels": "liger"}):
        rows = kept(Training(8, 1024, "bf16", attention="flash", **more))
        assert ("norms", 2 * T * (2 * h + 8)) in rows and ("mlp", T * 2 * 3 * f) in rows
    rows = kept(Training(8, 1024, "bf16", attention="flash"))
    assert ("norms", 2 * T * (4 * h + 4 + 2 * h)) in rows and ("mlp", T * 2 * 4 * f) in rows


def test_autocasts_copies_of_one_input_are_one_where_it_is_compiled():
    T, h = 8 * 1024, 512
    inputs = {("linear inputs", times * T * 2 * h) for times in (1, 2, 3)}
    for compiled, found in ((True, {1}), (False, {3, 2})):
        rows = kept(Training(8, 1024, "autocast-bf16", compile=compiled))
        assert rows & inputs == {("linear inputs", times * T * 2 * h) for times in found}


def test_recomputed_blocks_that_call_flash_attn_are_counted_eager():
    """Dynamo leaves out a checkpointed block whose graph breaks."""
    T, h, f = 8 * 1024, 512, 2048
    rows = kept(Training(8, 1024, "bf16", attention="flash", checkpointing="full", compile=True))
    assert ("norms", 2 * T * (4 * h + 4 + 2 * h)) in rows and ("mlp", T * 2 * 4 * f) in rows


def test_compiled_adapters_of_one_input_share_its_copy():
    T, h, f, rank = 8 * 1024, 512, 2048, 8
    for compiled, inputs in ((True, h + h + h + f), (False, 2 * h + h + 2 * h + f)):
        rows = kept(Training(8, 1024, "bf16", lora=ALL, compile=compiled))
        assert ("adapters", 4 * T * (inputs + 6 * rank)) in rows


def test_a_recomputed_compiled_block_keeps_no_copies_of_its_weights():
    """Autocast's cache is eager; a compiled forward casts each weight for its product."""
    given = {"precision": "autocast-bf16", "checkpointing": "full"}
    eager, compiled = (moments(compile=choice, **given) for choice in (False, True))
    block = lab.model(LLAMA).block_linear_elements
    T, h, f, name = 8 * 1024, 512, 2048, "the last block of forward"
    # And one kernel makes the activation and the product, when what both branches read is gone.
    assert eager[name] - compiled[name] == 2 * block + T * (2 * f + 4 * h)


def moments(model=LLAMA, gpu=A100, **given):
    run = Training(**{"micro_batch": 8, "seq_len": 1024, "precision": "bf16", "compile": True, **given})
    return {each.name: each.total for each in training_moments(lab.model(model), run, gpu)}


def test_selective_recomputation_sums_up_what_blocks_were_given():
    """The partitioner keeps the first block's input alone, beside what blocks' products returned."""
    layers = [moments({**LLAMA, "num_hidden_layers": count}, checkpointing="selective") for count in (2, 3)]
    T, h, f, Q, K = 8 * 1024, 512, 2048, 512, 128
    states = 8 * (lab.model({**LLAMA, "num_hidden_layers": 3}).parameters - lab.model(LLAMA).parameters)
    more = layers[1]["the loss"] - layers[0]["the loss"]
    assert more == states * 6 // 8 + T * (2 * (Q + 2 * K + Q + 2 * h + 2 * f) + 4 * 8)


def test_of_recomputed_products_sums_are_made_in_place_and_only_adapted_keys_are_written_for_all_heads():
    T, Q, K, one = 8 * 1024, 512, 64, {**LLAMA, "num_key_value_heads": 1}
    share = share_of(lab.model(one), Training(8, 1024, "bf16", checkpointing="selective", compile=True), A100)
    kept, whole = checkpointed(share), per_device(block_saved(share), share.run)
    assert block_backward(share, kept, whole).recomputed == sum(whole.values()) - kept["matmul outputs"]
    adapted = replace(share, run=replace(share.run, lora=lab.LoRA(8)))
    kept, whole = checkpointed(adapted), per_device(block_saved(adapted), adapted.run)
    more = block_backward(adapted, kept, whole).recomputed - sum(whole.values()) + kept["matmul outputs"]
    assert more == 2 * T * (2 * 2 * (Q - K) - 4 * K)  # of two layers; what the values' adapter returned is gone


def test_from_hopper_on_the_mask_is_kept_and_before_it_backward_writes_it_for_all_heads():
    mask, hopper = 8 * 2048**2 * 2, lab.gpu("H100")
    kept, made = (moments(gpu=gpu, checkpointing="full", seq_len=2048) for gpu in (hopper, A100))
    workspaces = 2 * (hopper.cublas_workspace - A100.cublas_workspace)
    assert kept["the loss"] - workspaces - made["the loss"] == mask
    assert made["the first block of backward"] - kept["the first block of backward"] + workspaces > 3 * mask
    assert made["the last block of backward"] < kept["the last block of backward"]  # the graph writes it once


def test_of_a_recomputed_mlps_adapters_nothing_is_left_when_attention_writes_masks_for_all_heads():
    left = []
    for lora in (lab.LoRA(8), ALL):
        found = moments(checkpointing="full", micro_batch=1, seq_len=8192, lora=lora)
        left.append(found["the first block of backward"] - found["weights loaded"])
    assert left[1] == pytest.approx(left[0], rel=0.02) and left[0] > 9 * 8192**2 * 2


def test_adapters_in_a_recomputed_mlp_hold_what_they_cast_until_their_weights_have_gradients():
    """Sixteen tensors of the MLP's width, in halves, where without them there are four; of half adapters eleven."""
    T, f = 8 * 1024, 2048
    given = {"checkpointing": "full", "gpu": lab.gpu("H100")}
    for lora, times in ((lab.LoRA(8), 4), (lab.LoRA(8, ALL.targets, autocast_adapter_dtype=False), 11), (ALL, 16)):
        left = []
        for width in (f, 2 * f):
            found = moments({**LLAMA, "intermediate_size": width}, lora=lora, **given)
            left.append(found["the first block of backward"] - found["weights loaded"])
        assert (left[1] - left[0]) / (2 * T * f) == pytest.approx(times, abs=0.1)


def test_an_odd_vocabulary_is_padded_for_the_heads_products():
    """GPT-2's 50,257 words: a copy of the logits more, in half precision; of a frozen head the one product that there
    is reads a padded gradient."""
    for lora, copies in ((None, 4), (lab.LoRA(8, targets=("c_attn",)), 3)):
        run = Training(8, 1024, "bf16", compile=True, lora=lora)
        aligned, odd = ({**GPT, "vocab_size": words} for words in (50_304, 50_257))
        assert logits_at("the gradient of the logits", aligned, run) == 3 * 2 * run.tokens * 50_304
        assert logits_at("the gradient of the logits", odd, run) == copies * 2 * run.tokens * 50_257


def test_a_tied_heads_gradient_comes_last_and_the_logits_gradient_waits_for_it():
    """Not under autocast, nor where it is frozen: there the logits alone are left."""
    T, V, last = 8 * 1024, TIED["vocab_size"], "the embedding's gradient"
    for given, logits in (({}, 2), ({"precision": "autocast-bf16"}, 1), ({"lora": lab.LoRA(8)}, 1)):
        run = Training(**{"micro_batch": 8, "seq_len": 1024, "precision": "bf16", "compile": True, **given})
        found = {each.name: each.parts for each in training_moments(lab.model(TIED), run, A100)}
        assert found[last]["logits"] == logits * 2 * T * V
        assert (found["the head's gradient"]["gradients"] > 0) == (run.precision == "autocast-bf16")


def test_a_tied_heads_padded_product_is_no_operator_with_the_sum_and_comes_first():
    words, T = TIED["vocab_size"] + 1, 8 * 1024
    run = Training(8, 1024, "bf16", compile=True)
    found = {each.name: each.parts for each in training_moments(lab.model({**TIED, "vocab_size": words}), run, A100)}
    assert found["the head's gradient"]["gradients"] == 2 * 512 * words
    assert found["the last block of backward"]["logits"] == 2 * T * words


def test_a_compiled_cap_keeps_both_its_sides():
    run = Training(8, 1024, "bf16", compile=True, attention="eager")
    logits = 2 * run.tokens * 256_000
    assert logits_at("the gradient of the logits", "google/gemma-2-2b", run) == 4 * logits
    assert logits_at("the head's gradient", "google/gemma-2-2b", run) == 2 * logits  # the gradient is made
    assert logits_at("the embedding's gradient", "google/gemma-2-2b", run) == 2 * logits  # which a tied head reads


def logits_at(name, model, run):
    return {each.name: each.parts["logits"] for each in training_moments(lab.model(model), run, A100)}[name]


def test_compiled_norms_of_queries_and_keys_keep_what_they_read():
    T, Q, K = 8 * 1024, 2048, 1024
    for compiled, element in ((True, 2), (False, 6)):
        rows = kept(Training(8, 1024, "bf16", compile=compiled), "Qwen/Qwen3-0.6B")
        assert ("norms", T * (element * (Q + K) + (4 * (16 + 8) if compiled else 0))) in rows


def test_compiled_eager_attention_keeps_two_matrices_of_scores_and_no_mask():
    S = 8 * 8 * 1024**2
    for precision, element in (("bf16", 2 + 2), ("autocast-bf16", 4 + 2)):
        run = Training(8, 1024, precision, compile=True, attention="eager")
        assert ("scores", S * element) in kept(run)
        share = share_of(lab.model(LLAMA), run, A100)
        assert causal_mask(share) == 0 and backward_scores(share) == 2 * S


@pytest.mark.parametrize(
    "model, seq_len, full, selective",
    [  # bytes of each score, of a block that is recomputed
        (LLAMA, 2048, 2 + 4 + 2, 2 + 2 + 4 + 2),  # softmax's output in fp32; selective has the gradient beside scores
        (LLAMA, 1024, 2 + 2 + 2, 2 + 2 + 2),  # no loop
        ("google/gemma-2-2b", 2048, 5 * 2 + 4, 3 * 2 + 4),  # a cap
        ("gpt2", 1024, 2 * (2 + 2 + 4), 2 * (2 + 2 + 4)),  # dropout: two blocks' scores and random numbers
    ],
)
def test_scores_of_recomputed_compiled_blocks(model, seq_len, full, selective):
    for checkpointing, element in (("full", full), ("selective", selective)):
        run = Training(1, seq_len, "bf16", compile=True, attention="eager", checkpointing=checkpointing)
        share = share_of(lab.model(model), run, A100)
        assert kept_scores(share) + backward_scores(share) == element * share.spec.heads * seq_len**2


def test_what_is_counted_compiled_can_be_out_of_memory_and_what_is_counted_eager_cannot():
    run = Training(64, 2048, "bf16", compile=True)
    assert assessed("Llama-3.2-1B", run, "A100-40GB", None)[0].outcome == "out of memory"
    quantized = Training(64, 2048, "bf16", compile=True, lora=lab.LoRA(8), quantization="nf4")
    report, fit = assessed("Llama-3.2-1B", quantized, "A100-40GB", None)
    assert fit.outcome == "out of memory" and report.outcome == "unknown"
